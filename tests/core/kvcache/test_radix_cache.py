"""Property tests of the radix cache against a plain model of it (DESIGN section 7, 4 to 7)."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.kvcache.naive_cache import NaivePrefixCache
from minisgl.kvcache.radix_cache import RadixPrefixCache

TOKENS = st.lists(st.integers(0, 2), max_size=14)


class RadixMachine(RuleBasedStateMachine):
    """Inserts, matches, locks and evicts; the model is a map from whole-page prefixes to pages."""

    @initialize(page_size=st.sampled_from([1, 2, 3]), block_pages=st.sampled_from([1, 2, 3, 256]))
    def start(self, page_size: int, block_pages: int) -> None:
        self.page_size = page_size
        self.cache = RadixPrefixCache(page_size, block_pages=block_pages)
        self.model: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[Any, tuple[int, ...]]] = []
        self.next_page = 1
        self.clock = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """All whole-page prefixes, short to long."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:end]) for end in ends]

    def touch(self, prefixes: list[tuple[int, ...]]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.used[prefix] = self.clock

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        prefixes = self.prefixes(tokens)
        own = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(prefixes)
        whole = np.array(tokens[: len(prefixes) * self.page_size], dtype=np.int32)
        match = self.cache.insert(whole, np.array(own, dtype=np.int32))
        expected = [self.model.get(p, page) for p, page in zip(prefixes, own, strict=True)]
        assert match.pages.tolist() == expected, "the canonical pages are the cache's own"
        self.model.update(zip(prefixes, expected, strict=True))
        self.touch(prefixes)

    @rule(tokens=TOKENS, keep=st.booleans())
    def match(self, tokens: list[int], keep: bool) -> None:
        """Invariant 6: the longest whole-page prefix, at least one token short of everything."""
        before = (self.cache.num_pages, self.cache.num_evictable_pages)
        match = self.cache.match(np.array(tokens, dtype=np.int32))
        found = []
        for prefix in self.prefixes(tokens[:-1]):
            if prefix not in self.model:
                break
            found.append(prefix)
        assert match.pages.tolist() == [self.model[prefix] for prefix in found]
        assert before == (self.cache.num_pages, self.cache.num_evictable_pages)
        if keep:
            self.cache.lock(match.handle)
            self.touch(found)
            self.locked.append((match.handle, found[-1] if found else ()))

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        handle, _ = self.locked.pop(which % len(self.locked))
        self.cache.unlock(handle)

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int) -> None:
        """Invariant 7: exactly what was asked if there is so much, and never a locked prefix."""
        available = self.cache.num_evictable_pages
        evicted = self.cache.evict(num_pages)
        assert len(evicted) == min(num_pages, available)
        gone = [prefix for prefix, page in self.model.items() if page in set(evicted)]
        assert len(gone) == len(evicted), "every evicted page was in the cache, once"
        for prefix in gone:
            del self.model[prefix]
        for prefix in self.model:
            parent = prefix[: -self.page_size]
            assert not parent or parent in self.model, "a page went before the pages behind it"
        for prefix in gone:
            # Nothing that is older, unlocked and at the end of a path may stay instead.
            for kept in self.leaves():
                if not self.is_locked(kept):
                    assert self.used[kept] >= self.used[prefix], "a more recent page went first"

    def leaves(self) -> list[tuple[int, ...]]:
        size = self.page_size
        inner = {prefix[:-size] for prefix in self.model}
        return [prefix for prefix in self.model if prefix not in inner]

    def is_locked(self, prefix: tuple[int, ...]) -> bool:
        return any(held[: len(prefix)] == prefix for _, held in self.locked)

    @invariant()
    def books_are_right(self) -> None:
        """Invariant 4: counts equal a recount. Invariant 5: handles keep their pages."""
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert self.cache.num_pages == len(self.model)
        held = {prefix for prefix in self.model if self.is_locked(prefix)}
        assert self.cache.num_evictable_pages == len(self.model) - len(held)
        for handle, prefix in self.locked:
            pages = self.cache.pages_of(handle).tolist()
            assert pages == [self.model[p] for p in self.prefixes(list(prefix))]


TestRadixCache = RadixMachine.TestCase
TestRadixCache.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_fully_cached_prompt_leaves_one_token_to_compute() -> None:
    cache = RadixPrefixCache(4)
    tokens = np.arange(8, dtype=np.int32)
    cache.insert(tokens, np.array([1, 2], dtype=np.int32))
    assert cache.match(tokens).pages.tolist() == [1]
    assert cache.match(np.append(tokens, 9).astype(np.int32)).pages.tolist() == [1, 2]


def test_an_empty_prompt_matches_nothing() -> None:
    assert RadixPrefixCache(1).match(np.empty(0, dtype=np.int32)).pages.tolist() == []


def test_unlocking_more_often_than_locking_is_our_own_bug() -> None:
    cache = RadixPrefixCache(1)
    match = cache.insert(np.array([1, 2], dtype=np.int32), np.array([1, 2], dtype=np.int32))
    cache.lock(match.handle)
    cache.unlock(match.handle)
    with pytest.raises(AssertionError, match="no more often"):
        cache.unlock(match.handle)


def test_a_shortened_leaf_keeps_its_beginning() -> None:
    cache = RadixPrefixCache(2)
    tokens = np.array([1, 1, 2, 2, 3, 3, 4, 4], dtype=np.int32)
    cache.insert(tokens, np.array([5, 6, 7, 8], dtype=np.int32))
    assert cache.evict(2) == [7, 8]
    assert cache.match(tokens).pages.tolist() == [5, 6]
    cache.check()


def test_the_naive_cache_keeps_nothing() -> None:
    cache = NaivePrefixCache(2)
    tokens = np.arange(4, dtype=np.int32)
    assert cache.insert(tokens, np.array([1, 2], dtype=np.int32)).pages.tolist() == []
    assert cache.match(tokens).pages.tolist() == []
    assert cache.evict(3) == []
    assert (cache.num_pages, cache.num_evictable_pages) == (0, 0)
