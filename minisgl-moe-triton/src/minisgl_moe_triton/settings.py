"""``backend_options.triton`` of the MoE backend. Imports no torch."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class TritonMoeSettings(BaseModel):
    """How the backend ``triton`` runs routed experts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tuned_folder: Path | None = Field(
        None,
        description="Tuned launches: read here, and written by minisgl tune moe; else in ~/.config.",
    )
