"""How the versions rank beside other backends, from measurements on one H200. No torch.

| prefill, causal, TFLOP/s          | FA4, page size 128 | FA4, 16 | FlashInfer fa3 |
|-----------------------------------|--------------------|---------|----------------|
| 8,192 tokens, 32/8 heads of 128   | 590                | 561     | 537            |
| 16 prompts of 1,024, 16/8 heads   | 247                |         | 298            |

| decode, TB/s of K and V read              | FA4, page size 128 | FA3, 64 | FlashInfer, 64 |
|-------------------------------------------|--------------------|---------|----------------|
| 256 rows of 450 to 1,350, 16/8 heads      | 2.36               | 3.98    | 4.25           |
| 64 rows of 4,096 to 12,288, 32/4 heads    | 2.67               | 3.85    | 3.99           |

FlashInfer has rank 100 in both phases, core's Triton kernels 10, the reference 0. FA3's prefill was
not measured itself: FlashInfer's fa3 is made of it. What nobody has measured at all (FA2, and other
devices) stands between the last two.
"""

from minisgl.plugins import BackendQuery
from minisgl_attn_fa.edges import pages_by_tma
from minisgl_attn_fa.installed import VersionName

_ABOVE_FLASHINFER, _BELOW_FLASHINFER = 110, 90
_NOT_MEASURED = 5

_NOT_WORTH_A_TRY = 0
"""Below Triton, and at 0 an engine does not even create the backend to measure it: version 4 does
not split rows on Hopper, and compiles for seconds."""


def prefill_rank(name: VersionName, query: BackendQuery) -> int:
    """Return the rank of prefill and of mixed launches."""
    if not _is_hopper(query) or name == "fa2":
        return _NOT_MEASURED
    if name == "fa4" and pages_by_tma(query):
        return _ABOVE_FLASHINFER
    return _BELOW_FLASHINFER


def decode_rank(name: VersionName, query: BackendQuery) -> int:
    """Return the rank of decode launches."""
    if name == "fa4":
        return _NOT_WORTH_A_TRY
    return _BELOW_FLASHINFER if name == "fa3" and _is_hopper(query) else _NOT_MEASURED


def _is_hopper(query: BackendQuery) -> bool:
    return query.compute_capability is not None and query.compute_capability[0] == 9
