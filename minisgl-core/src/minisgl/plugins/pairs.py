"""Whether two attention backends, one for prefill and one for decode, can read one KV pool."""

from typing import Any

from minisgl.errors import UnsupportedBackendError
from minisgl.plugins.capabilities import alternatives
from minisgl.plugins.records import BackendQuery
from minisgl.plugins.registry import Offer, Registry


def check_pair(registry: Registry[Any], query: BackendQuery, prefill: str, decode: str) -> None:
    """Compare the pages that two backends read with each other, and with the pool's.

    Args:
        registry: of attention backends.
        query: what they must run on.
        prefill: a name, qualified or not.
        decode: the other one's.

    Raises:
        UnknownBackendError, AmbiguousBackendError: one of them is none, or several.
        UnsupportedBackendError: layout or page size of their pages differ; says both, and what to
            set.
    """
    offers = registry.get(prefill), registry.get(decode)
    label = f"{registry.setting}={prefill + ',' + decode!r} cannot be a pair"
    _check_layouts(label, registry, query, offers)
    _check_page_sizes(label, registry, query, offers)


def _check_layouts(
    label: str,
    registry: Registry[Any],
    query: BackendQuery,
    offers: tuple[Offer[Any], Offer[Any]],
) -> None:
    first, second = (offer.record.capabilities.kv_layout for offer in offers)
    if first == second == query.kv_layout:
        return
    fitting = [
        offer.name for offer in registry if offer.record.capabilities.kv_layout == query.kv_layout
    ]
    raise UnsupportedBackendError(
        f"{label}: {offers[0].name!r} reads pages of layout {first} and {offers[1].name!r} of "
        f"layout {second}, but both read one KV pool, whose pages are {query.kv_layout}. Set "
        f"{registry.setting} to backends of that layout ({', '.join(fitting) or 'there are none'}),"
        " or cache.pool to a pool of another one."
    )


def _check_page_sizes(
    label: str,
    registry: Registry[Any],
    query: BackendQuery,
    offers: tuple[Offer[Any], Offer[Any]],
) -> None:
    first, second = (offer.record.capabilities.page_sizes for offer in offers)
    taken = [set(sizes) for sizes in (first, second) if sizes is not None]
    if all(query.page_size in sizes for sizes in taken):
        return
    common = sorted(set.intersection(*taken))
    if common:
        way_out = f"Set cache.page_size to {alternatives(tuple(common))}."
    else:
        way_out = f"No page size suits both: set {registry.setting} to one of them, or to others."
    raise UnsupportedBackendError(
        f"{label}: {offers[0].name!r} takes {_pages(first)} and {offers[1].name!r} takes "
        f"{_pages(second)}, but both read one KV pool, with cache.page_size={query.page_size}. "
        f"{way_out}"
    )


def _pages(sizes: tuple[int, ...] | None) -> str:
    if sizes is None:
        return "pages of any size"
    return f"pages of {alternatives(sizes)} tokens"
