"""How the versions rank beside other backends. No torch.

Version 4 has the ranks of ``measured_ranks``. FA3 was measured for decode alone, on one H200: 3.98
TB/s of K and V for 256 rows of 450 to 1,350 tokens of 16/8 heads, where FlashInfer read 4.25; and
FlashInfer's fa3 is made of it. What nobody has measured at all (FA2, and other devices) stands
between core's Triton kernels and the reference.
"""

from minisgl.plugins import BackendQuery
from minisgl_attn_fa.edges import pages_by_tma
from minisgl_attn_fa.installed import VersionName
from minisgl_attn_fa.measured_ranks import RANKS

_FA3 = 80
"""Below FlashInfer."""

_NOT_MEASURED = 5

_LARGEST_WITHOUT_TMA = 64
"""Pages that version 4 copies token by token count as this size at most."""


def prefill_rank(name: VersionName, query: BackendQuery) -> int:
    """Return the rank of prefill and of mixed launches."""
    if not _is_hopper(query) or name == "fa2":
        return _NOT_MEASURED
    if name == "fa3":
        return _FA3
    return RANKS["fa"].prefill_rank(_page_size(query), query.num_q_heads, query.num_kv_heads)


def decode_rank(name: VersionName, query: BackendQuery) -> int:
    """Return the rank of decode launches.

    Version 4 does not split rows on Hopper, and ranks elsewhere as it does there.
    """
    if name == "fa4":
        return RANKS["fa"].decode_rank(_page_size(query), query.num_q_heads, query.num_kv_heads)
    return _FA3 if name == "fa3" and _is_hopper(query) else _NOT_MEASURED


def source(name: VersionName, query: BackendQuery) -> str:
    """Say where the ranks come from."""
    if not _is_hopper(query) or name == "fa2":
        return "nobody has measured this version here: below all that was"
    return RANKS["fa"].source if name == "fa4" else "by hand, from figures on an NVIDIA H200"


def _page_size(query: BackendQuery) -> int:
    """Return the page size whose measurement applies."""
    if pages_by_tma(query):
        return query.page_size
    return min(query.page_size, _LARGEST_WITHOUT_TMA)


def _is_hopper(query: BackendQuery) -> bool:
    return query.compute_capability is not None and query.compute_capability[0] == 9
