"""What is on offer. Imports neither torch nor FlashInfer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minisgl.plugins import AttentionBackendRecord, Capabilities, hookimpl
from minisgl_attn_flashinfer.probe import probe
from minisgl_attn_flashinfer.settings import FlashInferSettings, TrtllmSettings
from minisgl_attn_flashinfer.trtllm_probe import PAGE_SIZES, probe_trtllm

if TYPE_CHECKING:
    from minisgl.attention import AttentionBackend, AttentionContext


def _create(context: "AttentionContext", settings: FlashInferSettings) -> "AttentionBackend":
    from minisgl_attn_flashinfer.create import create_backend

    return create_backend(context, settings)


def _create_trtllm(context: "AttentionContext", settings: TrtllmSettings) -> "AttentionBackend":
    from minisgl_attn_flashinfer.trtllm_create import create_trtllm

    return create_trtllm(context, settings)


@hookimpl
def minisgl_attention_backends() -> Iterable[AttentionBackendRecord[Any]]:
    """Offer ``flashinfer`` for both phases, and ``trtllm`` for decode."""
    return [
        AttentionBackendRecord(
            name="flashinfer",
            summary="FlashInfer's paged prefill and decode kernels, on NVIDIA GPUs",
            settings_type=FlashInferSettings,
            probe=probe,
            create=_create,
            capabilities=Capabilities(
                dtypes=("bfloat16", "float16"),
                kv_dtypes=("bfloat16", "float16"),
                head_dims=(64, 128, 256),
                devices=("cuda",),
                min_compute_capability=(8, 0),
                cuda_graphs=True,
                mixed_batches=True,
            ),
        ),
        AttentionBackendRecord(
            name="trtllm",
            summary="TensorRT-LLM's decode kernels, xqa and trtllm-gen, through FlashInfer",
            settings_type=TrtllmSettings,
            probe=probe_trtllm,
            create=_create_trtllm,
            capabilities=Capabilities(
                phases=("decode",),
                page_sizes=PAGE_SIZES,
                dtypes=("bfloat16", "float16"),
                kv_dtypes=("bfloat16", "float16"),
                head_dims=(64, 128, 256),
                devices=("cuda",),
                min_compute_capability=(9, 0),
                cuda_graphs=True,
            ),
        ),
    ]
