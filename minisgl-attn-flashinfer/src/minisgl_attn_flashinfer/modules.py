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


def xqa_module(dtype: str, page_size: int, head_dim: int, group: int) -> str:
    """Return the name of the module of xqa's decode kernels, one for each shape.

    As in ``gen_xqa_module`` in FlashInfer's ``jit/xqa.py``: no window, one query a row.
    """
    short = _SHORT[dtype]
    return (
        f"xqa_input_{short}_kv_cache_{short}_output_{short}_page_size_{page_size}_"
        f"head_dim_{head_dim}_head_group_ratio_{group}_"
        "use_sliding_window_False_use_spec_dec_False_spec_q_seq_len_1"
    )


TRTLLM_GEN_MODULE = "fmha_gen"
"""The module that launches trtllm-gen's kernels; those come compiled, in ``flashinfer-cubin``."""
