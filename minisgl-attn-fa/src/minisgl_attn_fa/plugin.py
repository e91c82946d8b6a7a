"""What is on offer. Imports neither torch nor FlashAttention."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minisgl.plugins import AttentionBackendRecord, Capabilities, hookimpl
from minisgl_attn_fa.probe import probe
from minisgl_attn_fa.settings import FaSettings

if TYPE_CHECKING:
    from minisgl.attention import AttentionBackend, AttentionContext


def _create(context: "AttentionContext", settings: FaSettings) -> "AttentionBackend":
    from minisgl_attn_fa.create import create_backend

    return create_backend(context, settings)


@hookimpl
def minisgl_attention_backends() -> Iterable[AttentionBackendRecord[Any]]:
    """Offer the backend ``fa``, for both phases; its versions differ, the probe says how."""
    return [
        AttentionBackendRecord(
            name="fa",
            summary="FlashAttention 4, 3 or 2, on NVIDIA GPUs",
            settings_type=FaSettings,
            probe=probe,
            create=_create,
            capabilities=Capabilities(
                dtypes=("bfloat16", "float16"),
                kv_dtypes=("bfloat16", "float16"),
                devices=("cuda",),
                min_compute_capability=(8, 0),
                cuda_graphs=True,
                mixed_batches=True,
                sliding_window=True,
                logit_soft_cap=True,
            ),
        )
    ]
