"""K and V storage in pages, and the caches that share pages between equal prefixes.

Names load lazily, so that plugins can name this package without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.kvcache.interface import CacheHandle, KVCachePool, KVPoolSpec, Match, PrefixCache
    from minisgl.kvcache.mha_pool import MHAKVCachePool
    from minisgl.kvcache.naive_cache import NaivePrefixCache
    from minisgl.kvcache.radix_cache import RadixPrefixCache

__all__ = [
    "CacheHandle",
    "KVCachePool",
    "KVPoolSpec",
    "MHAKVCachePool",
    "Match",
    "NaivePrefixCache",
    "PrefixCache",
    "RadixPrefixCache",
]

_LAZY = {
    "CacheHandle": "minisgl.kvcache.interface",
    "KVCachePool": "minisgl.kvcache.interface",
    "KVPoolSpec": "minisgl.kvcache.interface",
    "Match": "minisgl.kvcache.interface",
    "PrefixCache": "minisgl.kvcache.interface",
    "MHAKVCachePool": "minisgl.kvcache.mha_pool",
    "NaivePrefixCache": "minisgl.kvcache.naive_cache",
    "RadixPrefixCache": "minisgl.kvcache.radix_cache",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
