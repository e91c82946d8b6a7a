"""Names of the compiled modules that FlashInfer 0.6 wants for a model. Imports no kernels.

The names are FlashInfer's own (``get_batch_prefill_uri``, ``get_batch_decode_uri`` in its
``jit/attention/modules.py``); they are repeated here because importing FlashInfer takes seconds
and touches the driver, which a probe must not do. A test on a card compares them.
"""

from typing import Literal

Template = Literal["fa2", "fa3"]

CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
"""Query heads per KV head that the CUDA-core kernels are instantiated for."""

_SHORT = {"bfloat16": "bf16", "float16": "f16"}


def prefill_module(template: Template, dtype: str, head_dim: int) -> str:
    """Return the name of the module of a prefill template; ``fa2`` also decodes."""
    suffix = "_sm90" if template == "fa3" else ""
    return f"batch_prefill_{_variant(dtype, head_dim)}_f16qk_False{suffix}"


def decode_module(dtype: str, head_dim: int) -> str:
    """Return the name of the module of the CUDA-core decode kernels."""
    return f"batch_decode_{_variant(dtype, head_dim)}"


def _variant(dtype: str, head_dim: int) -> str:
    """Name what is common: one dtype, int32 indices, no rotation, no window, no soft cap."""
    short = _SHORT[dtype]
    return (
        f"with_kv_cache_dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}_dtype_idx_i32_"
        f"head_dim_qk_{head_dim}_head_dim_vo_{head_dim}_posenc_0_use_swa_False_"
        "use_logits_cap_False"
    )
