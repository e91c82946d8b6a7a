"""Whether a FlashAttention can run a model here. Imports neither torch nor any of them."""

from minisgl.plugins import BackendQuery, Supported, Unsupported
from minisgl_attn_fa.edges import all_reasons, describe
from minisgl_attn_fa.ranks import decode_rank, prefill_rank, source


def probe(query: BackendQuery) -> Supported | Unsupported:
    """Answer for the version that ``auto`` takes; core has compared the capabilities before."""
    reasons = all_reasons(query)
    for name, reason in reasons.items():
        if reason is None:
            return Supported(
                prefill_rank=prefill_rank(name, query),
                decode_rank=decode_rank(name, query),
                source=source(name, query),
            )
    return Unsupported(describe(reasons))
