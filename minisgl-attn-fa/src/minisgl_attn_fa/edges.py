"""What each FlashAttention cannot do. Pure functions: no torch.

From the sources: ``flash_attn/cute/interface.py`` of flash-attn-4 4.0.0b36, and
``csrc/flash_attn/flash_api.cpp`` and ``hopper/flash_api.cpp`` of flash-attn 2.8.3.
"""

from minisgl.plugins import BackendQuery
from minisgl_attn_fa.installed import RELEASES, VersionName, why_unusable

MOST_HEAD_DIM = 256

_FA2_PAGE = 256
"""Version 2 takes pages of multiples of it."""

_BLACKWELL_HEAD_DIM = 128
"""Of version 4 there: larger ones are a kernel of their own, with other rules."""

_LARGE_HEAD_DIMS_OF_4 = (192, 256)
"""Beyond 128. Version 4 copies pages in passes of rows (``paged_kv.py``), and checks no row: a tile
of keys must be whole passes, which with its tiles for 144, 160, 176, 208, 224 and 240 it is not."""


def why_not(name: VersionName, query: BackendQuery) -> str | None:
    """Return why this FlashAttention cannot serve a model here, or ``None`` if it can.

    What can never run is said before what is only not installed.
    """
    return _edge(name, query) or why_unusable(name)


def all_reasons(query: BackendQuery) -> dict[VersionName, str | None]:
    """Return ``why_not`` of every version, in the order in which ``auto`` asks."""
    return {name: why_not(name, query) for name in RELEASES}


def describe(reasons: dict[VersionName, str | None]) -> str:
    """Write the reasons against versions as one line."""
    return "; ".join(
        f"{RELEASES[name].title} {reason}" for name, reason in reasons.items() if reason is not None
    )


def pages_by_tma(query: BackendQuery) -> bool:
    """Whether version 4 loads pages by TMA: on 9.x, if a page is one of its tiles of keys.

    Then it loads whole pages, what lies behind a row's last token included. Pages of other sizes
    are copied token by token, which is slower and reads nothing behind a row's end.
    """
    # _tile_size_fwd_sm90: 128 keys a tile up to a head dim of 128.
    return query.page_size == 128 and query.head_dim <= 128


def _edge(name: VersionName, query: BackendQuery) -> str | None:
    capability = query.compute_capability or (0, 0)
    if query.kv_dtype != query.dtype:
        return f"needs K and V in the dtype of q, {query.dtype}; got {query.kv_dtype}"
    if query.num_q_heads % query.num_kv_heads:
        return (
            f"needs KV heads that divide the query heads, found {query.num_q_heads} query heads "
            f"and {query.num_kv_heads} KV heads"
        )
    if query.head_dim % 8 or query.head_dim > MOST_HEAD_DIM:
        return (
            f"needs head dims that 8 divides, up to {MOST_HEAD_DIM}; the model has {query.head_dim}"
        )
    if name == "fa4":
        return _edge_of_4(query, capability)
    if name == "fa3" and capability[0] != 9:
        return f"needs compute capability 9.x, found {_write(capability)}"
    if name == "fa2" and query.page_size % _FA2_PAGE:
        return f"takes pages of multiples of {_FA2_PAGE} tokens, found {query.page_size}"
    return None


def _edge_of_4(query: BackendQuery, capability: tuple[int, int]) -> str | None:
    if capability[0] not in {9, 10, 11}:
        return f"reads pages on compute capability 9.x to 11.x only, found {_write(capability)}"
    small = query.head_dim <= 128
    if query.head_dim % 16 or not (small or query.head_dim in _LARGE_HEAD_DIMS_OF_4):
        return (
            "reads pages of head dims that 16 divides up to 128, of 192 and of 256; the model has "
            f"{query.head_dim}"
        )
    if capability[0] > 9 and query.head_dim > _BLACKWELL_HEAD_DIM:
        return (
            f"takes head dims of up to {_BLACKWELL_HEAD_DIM} on compute capability "
            f"{_write(capability)}, the model has {query.head_dim}"
        )
    if query.logit_soft_cap:
        return (
            "compiles a cap on attention scores into its kernel, at the first request that has it; "
            "the model caps scores"
        )
    return None


def _write(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
