"""The prefix caches by example; ``test_radix_invariants.py`` has their laws."""

import numpy as np
import pytest

from minisgl.kvcache.naive_cache import NaivePrefixCache
from minisgl.kvcache.radix_cache import RadixPrefixCache


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
    assert cache.evict(2).tolist() == [7, 8]
    assert cache.match(tokens).pages.tolist() == [5, 6]
    cache.check()


def test_the_naive_cache_keeps_nothing() -> None:
    cache = NaivePrefixCache(2)
    tokens = np.arange(4, dtype=np.int32)
    assert cache.insert(tokens, np.array([1, 2], dtype=np.int32)).pages.tolist() == []
    assert cache.match(tokens).pages.tolist() == []
    assert cache.evict(3).tolist() == []
    assert (cache.num_pages, cache.num_evictable_pages) == (0, 0)
