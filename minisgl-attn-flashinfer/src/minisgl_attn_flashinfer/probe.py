"""Whether FlashInfer can run a model here. Imports neither torch nor FlashInfer."""

from minisgl.plugins import BackendQuery, Supported, Unsupported
from minisgl_attn_flashinfer import installed
from minisgl_attn_flashinfer.measured_ranks import RANKS
from minisgl_attn_flashinfer.modules import CUDA_CORE_GROUPS, decode_module, prefill_module


def probe(query: BackendQuery) -> Supported | Unsupported:
    """Answer from what is installed; core has compared the capabilities before.

    A phase is served if one of its modules is compiled, or can be compiled at start-up.
    """
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
    prefill, decode = prefill_modules(query), decode_modules(query)
    missing = {module: installed.why_missing(module) for module in (*prefill, *decode)}
    serves_prefill = any(missing[module] is None for module in prefill)
    serves_decode = any(missing[module] is None for module in decode)
    if not (serves_prefill or serves_decode):
        return Unsupported(missing_modules(prefill[0], str(missing[prefill[0]])))
    ranks, shape = RANKS["flashinfer"], (query.page_size, query.num_q_heads, query.num_kv_heads)
    return Supported(
        prefill_rank=ranks.prefill_rank(*shape) if serves_prefill else None,
        decode_rank=ranks.decode_rank(*shape) if serves_decode else None,
        source=ranks.source,
    )


def prefill_modules(query: BackendQuery) -> list[str]:
    """Return the modules that can prefill, the preferred one first."""
    modules = [prefill_module("fa2", query.dtype, query.head_dim)]
    if query.compute_capability is not None and query.compute_capability[0] == 9:
        modules.insert(0, prefill_module("fa3", query.dtype, query.head_dim))
    return modules


def decode_modules(query: BackendQuery) -> list[str]:
    """Return the modules that can decode."""
    modules = [prefill_module("fa2", query.dtype, query.head_dim)]
    if query.num_q_heads // query.num_kv_heads in CUDA_CORE_GROUPS:
        modules.append(decode_module(query.dtype, query.head_dim))
    return modules


def missing_modules(module: str, lacking: str) -> str:
    """Say that a module is not there, what is lacking to compile it, and the two ways out."""
    version = installed.flashinfer_version()
    return (
        f"FlashInfer {version} has no compiled {module}, and cannot compile it: {lacking}. "
        f"Install flashinfer-jit-cache {version}, which has compiled kernels, or nvcc and ninja"
    )
