"""How the versions rank beside other backends, from measurements on one H200. No torch.

| prefill, causal, TFLOP/s          | FA4, page size 128 | FA4, 16 | FlashInfer fa3 |
|-----------------------------------|--------------------|---------|----------------|
| 8,192 tokens, 32/8 heads of 128   | 590                | 561     | 537            |
| 16 prompts of 1,024, 16/8 heads   | 247                |         | 298            |

| decode, TB/s of K and V read              | FA4, page size 128 | FA3, 64 | FlashInfer, 64 |
|-------------------------------------------|--------------------|---------|----------------|
| 256 rows of 450 to 1,350, 16/8 heads      | 2.36               | 3.98    | 4.25           |
| 64 rows of 4,096 to 12,288, 32/4 heads    | 2.67               | 3.85    | 3.99           |

Version 4 has the ranks of ``measured_ranks``. FA3 was measured for decode alone, and FlashInfer's
fa3 is made of it. What nobody has measured at all (FA2, and other devices) stands between core's
Triton kernels and the reference.
"""

from minisgl.plugins import BackendQuery
from minisgl_attn_fa.edges import pages_by_tma
from minisgl_attn_fa.installed import VersionName
from minisgl_attn_fa.measured_ranks import RANKS

_FA3 = 90
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
