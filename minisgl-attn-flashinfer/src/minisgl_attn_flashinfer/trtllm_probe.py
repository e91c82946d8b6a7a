"""Whether TensorRT-LLM's decode kernels can run a model here. Imports neither torch nor FlashInfer.

FlashInfer has two of them: xqa, a module for each shape, on compute capability 9.x and 12.x; and
trtllm-gen, kernels that come compiled, on 10.x. FlashInfer's ``trtllm_batch_decode_with_kv_cache``
chooses by the device in the same way.
"""

from typing import Literal

from minisgl.plugins import BackendQuery, Supported, Unsupported
from minisgl_attn_flashinfer import installed
from minisgl_attn_flashinfer.measured_ranks import RANKS
from minisgl_attn_flashinfer.modules import TRTLLM_GEN_MODULE, xqa_module
from minisgl_attn_flashinfer.probe import missing_modules

TrtllmKernel = Literal["xqa", "trtllm-gen"]

PAGE_SIZES = (16, 32, 64, 128)
"""That both kernels have."""

MOST_XQA_GROUP = 16
"""Query heads per KV head: rows of one of its tiles."""

NOT_COMPILED_RANK = 0
"""Of what has to be compiled first, for minutes: an engine does that if it is told to, but not to
measure it beside the others."""


def probe_trtllm(query: BackendQuery) -> Supported | Unsupported:
    """Answer from what is installed; core has compared the capabilities before."""
    reason = installed.why_unusable()
    if reason is not None:
        return Unsupported(reason)
    if query.kv_dtype != query.dtype:
        return Unsupported(f"needs K and V in the dtype of q, {query.dtype}; got {query.kv_dtype}")
    if query.num_q_heads % query.num_kv_heads:
        return Unsupported(
            f"needs KV heads that divide the query heads, found {query.num_q_heads} query heads "
            f"and {query.num_kv_heads} KV heads"
        )
    kernel = kernel_for(query.compute_capability)
    if kernel is None:
        capability = query.compute_capability or (0, 0)
        return Unsupported(
            f"needs compute capability 9.x, 10.x or 12.x, found {capability[0]}.{capability[1]}"
        )
    group = query.num_q_heads // query.num_kv_heads
    if kernel == "xqa" and group > MOST_XQA_GROUP:
        return Unsupported(
            f"takes up to {MOST_XQA_GROUP} query heads per KV head, the model has {group}"
        )
    if kernel == "trtllm-gen" and not installed.cubins_installed():
        version = installed.flashinfer_version()
        return Unsupported(
            f"needs flashinfer-cubin {version}, which is not installed: without it FlashInfer "
            f"would download kernels while it serves. pip install flashinfer-cubin=={version}"
        )
    module = module_for(kernel, query)
    lacking = installed.why_missing(module)
    if lacking is not None:
        return Unsupported(missing_modules(module, lacking))
    return _ranked(query, compiled=installed.precompiled(module))


def _ranked(query: BackendQuery, *, compiled: bool) -> Supported:
    if not compiled:
        why = "it would have to be compiled first, for minutes"
        return Supported(prefill_rank=None, decode_rank=NOT_COMPILED_RANK, source=why)
    ranks = RANKS["trtllm"]
    rank = ranks.decode_rank(query.page_size, query.num_q_heads, query.num_kv_heads)
    return Supported(prefill_rank=None, decode_rank=rank, source=ranks.source)


def kernel_for(capability: tuple[int, int] | None) -> TrtllmKernel | None:
    """Return which of the two runs on a device, if any."""
    kernels: dict[int, TrtllmKernel] = {9: "xqa", 10: "trtllm-gen", 12: "xqa"}
    return kernels.get(capability[0]) if capability is not None else None


def module_for(kernel: TrtllmKernel, query: BackendQuery) -> str:
    """Return the module that launches a kernel for a model."""
    if kernel == "trtllm-gen":
        return TRTLLM_GEN_MODULE
    group = query.num_q_heads // query.num_kv_heads
    return xqa_module(query.dtype, query.page_size, query.head_dim, group)
