"""What a KV pool and a prefix cache must offer.

Both count in pages of ``page_size`` tokens. Page 0 is the dummy page: it is never allocated and
never cached; padded rows point at it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

TokenArray = npt.NDArray[np.int32]
PageArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSpec:
    """Shape of a KV pool on one rank.

    Attributes:
        num_layers: layers that store K and V.
        num_kv_heads: on this rank.
        head_dim: elements a head.
        page_size: tokens a page.
        dtype: of the stored K and V.
        device: where they live.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device


class KVCachePool(ABC):
    """K and V of every layer, in pages.

    Their layout is ``NHD``, unless the pool's record declares another one: then ``layer`` returns
    pages of that, and only attention backends whose records declare the same are chosen.

    The pool is created before its size is known (models and backends hold a reference to it) and
    ``allocate`` gives it memory once the memory plan has counted everything else.
    """

    spec: KVPoolSpec
    num_pages: int
    """Pages in the pool, the dummy page included; 0 before ``allocate``."""

    @classmethod
    @abstractmethod
    def bytes_per_page(cls, spec: KVPoolSpec) -> int:
        """Bytes that one page takes over all layers, K and V together."""

    @abstractmethod
    def allocate(self, num_pages: int) -> None:
        """Allocate ``num_pages`` zeroed pages (page 0 is the dummy), instead of those before.

        Called once, or twice where steps are tried out before the pool is sized.

        Raises:
            DoesNotFitError: the device has not enough memory; names ``cache.num_pages``.
        """

    @abstractmethod
    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer, each ``[num_pages, page_size, kv_heads, head_dim]``."""

    def flat_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:  # noqa: ARG002
        """Return K and V of one layer by slot, each ``[slots, kv_heads, head_dim]``, or ``None``.

        A pool that answers lets operations write to these views in place of ``store``; ``None``
        is for one that stores anything but plain K and V (scales, other layouts).
        """
        return None

    @abstractmethod
    def store(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, layer: int) -> None:
        """Write ``k`` and ``v`` ``[T, kv_heads, head_dim]`` to ``slots`` ``[T]`` of one layer.

        A slot is ``page * page_size + offset``; tokens with slot -1 are not stored.
        """


CacheHandle = Any
"""A place in a prefix cache: opaque, stays valid through later inserts and splits while locked."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a token sequence.

    Attributes:
        handle: the place in the cache; lock it before anything may be evicted.
        pages: int32 ``[n]``: the pages of the prefix, in order; not to be written to.
    """

    handle: CacheHandle
    pages: PageArray


class PrefixCache(ABC):
    """Maps whole pages of tokens to pages of K and V, and forgets the least recently used.

    The cache owns the pages that it holds. A page is locked while any handle at or below it is.
    A salt separates tenants: what was inserted under one salt is found under no other, ``None``
    (no salt) included.
    """

    @abstractmethod
    def match(self, tokens: TokenArray, salt: str | None = None) -> Match:
        """Return the longest cached prefix of ``tokens``, in whole pages, less than all of them.

        At least one token is left to compute. Changes nothing: locking the handle is what marks
        the prefix as recently used. ``tokens`` may change after the call.
        """

    @abstractmethod
    def insert(self, tokens: TokenArray, pages: PageArray, salt: str | None = None) -> Match:
        """Cache ``tokens`` (a whole number of pages), whose K and V are in ``pages``.

        Both arrays may change after the call. Returns the pages that the cache now holds for the
        sequence's beginning, and their handle. They are canonical: where they differ from
        ``pages``, the cache held that prefix already, and the caller must rewrite its table to the
        cache's pages and free its own duplicates. Where they are equal, the page belongs to the
        cache from now on. Pages beyond those returned (all of them, for a cache that keeps
        nothing) stay the caller's. The handle is unlocked: lock it before anything may be evicted.
        """

    @abstractmethod
    def lock(self, handle: CacheHandle) -> None:
        """Keep the handle's pages from eviction; locks count."""

    @abstractmethod
    def unlock(self, handle: CacheHandle) -> None:
        """Undo one ``lock``."""

    @abstractmethod
    def evict(self, num_pages: int) -> PageArray:
        """Forget unlocked pages, least recently used first; returns them, now the caller's.

        Returns at least ``num_pages`` of them, or all that can be evicted, int32 ``[n]``.
        """

    @property
    @abstractmethod
    def num_evictable_pages(self) -> int:
        """Pages that ``evict`` could return now."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """Pages that the cache holds, locked ones included."""

    @abstractmethod
    def check(self) -> None:
        """Recount everything; raises ``AssertionError`` if a counter or an edge is wrong."""
