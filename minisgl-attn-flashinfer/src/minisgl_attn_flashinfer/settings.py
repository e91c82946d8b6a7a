"""``backend_options.flashinfer`` and ``.trtllm``. Imports neither torch nor FlashInfer."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FlashInferSettings(BaseModel):
    """How the backend ``flashinfer`` runs; the defaults follow measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_template: Literal["auto", "fa2", "fa3"] = Field(
        "auto",
        description="Kernel template of prefill: fa3 on compute capability 9.x, else fa2.",
    )
    decode_kernel: Literal["auto", "tensor", "cuda"] = Field(
        "auto",
        description=(
            "Decode on tensor cores or on CUDA cores; auto decides by rows and group size."
        ),
    )
    workspace_mib: int | None = Field(
        None,
        ge=1,
        description="Scratch memory of split rows on the device; computed if not given.",
    )
    pdl: bool = Field(
        True,
        description="Let a kernel start while the one before it ends (compute capability 9.0).",
    )


class TrtllmSettings(BaseModel):
    """How the backend ``trtllm`` runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pdl: bool = Field(
        True,
        description="Let a kernel start while the one before it ends.",
    )
