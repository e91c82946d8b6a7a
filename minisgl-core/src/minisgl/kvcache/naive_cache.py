"""The prefix cache that keeps nothing: every request computes its whole prompt."""

import numpy as np

from minisgl.kvcache.interface import CacheHandle, Match, PageArray, PrefixCache, TokenArray


class NaivePrefixCache(PrefixCache):
    """Matches nothing and holds nothing; pages stay their request's."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nothing = Match(handle=None, pages=np.empty(0, dtype=np.int32))

    def match(self, tokens: TokenArray, salt: str | None = None) -> Match:  # noqa: ARG002
        """Return the empty match."""
        return self._nothing

    def insert(
        self,
        tokens: TokenArray,  # noqa: ARG002
        pages: PageArray,  # noqa: ARG002
        salt: str | None = None,  # noqa: ARG002
    ) -> Match:
        """Hold nothing: all pages stay the caller's."""
        return self._nothing

    def lock(self, handle: CacheHandle) -> None:
        """Nothing can be evicted."""

    def unlock(self, handle: CacheHandle) -> None:
        """Nothing was locked."""

    def evict(self, num_pages: int) -> PageArray:  # noqa: ARG002
        """Return nothing."""
        return self._nothing.pages

    @property
    def num_evictable_pages(self) -> int:
        """0."""
        return 0

    @property
    def num_pages(self) -> int:
        """0."""
        return 0

    def check(self) -> None:
        """There is nothing to recount."""
