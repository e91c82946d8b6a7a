"""What the radix cache visits, counted, not timed."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.kvcache import radix_cache
from minisgl.kvcache.radix_cache import RadixPrefixCache


class Pops:
    """Counts what leaves the heap of evictable leaves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        pop = heapq.heappop

        def counted(heap: list[object]) -> object:
            self.count += 1
            return pop(heap)  # type: ignore[type-var]

        monkeypatch.setattr(radix_cache.heapq, "heappop", counted)  # type: ignore[attr-defined]


def array(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def leaves(num: int, size: int = 4) -> RadixPrefixCache:
    """A cache with ``num`` prompts of ``size`` pages that share nothing."""
    cache = RadixPrefixCache(1)
    for leaf in range(num):
        first = leaf * size
        cache.insert(
            np.arange(first, first + size, dtype=np.int32),
            np.arange(first + 1, first + size + 1, dtype=np.int32),
        )
    return cache


@pytest.mark.parametrize("num_leaves", [10, 1000])
def test_eviction_visits_as_many_leaves_as_it_takes(
    num_leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, pops = leaves(num_leaves), Pops(monkeypatch)
    assert len(cache.evict(9)) == 9
    assert pops.count == 3
    assert len(cache.evict(1)) == 1
    assert pops.count == 4


def test_each_use_costs_eviction_at_most_one_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, pops = leaves(100), Pops(monkeypatch)
    for leaf in (*range(0, 100, 2), *range(0, 50, 2)):
        handle = cache.match(np.arange(leaf * 4, leaf * 4 + 5, dtype=np.int32)).handle
        cache.lock(handle)
        cache.unlock(handle)
    num_uses = 75
    evicted = cache.evict(4 * 60)
    assert len(evicted) == 240
    assert pops.count <= 60 + num_uses
    before = pops.count
    assert len(cache.evict(40)) == 40
    assert pops.count == before + 10, "what was out of date is in order now"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_the_heap_holds_each_node_at_most_once(uses: list[int]) -> None:
    cache = leaves(10)
    for leaf in uses:
        handle = cache.match(np.arange(leaf * 4, leaf * 4 + 4, dtype=np.int32)).handle
        cache.lock(handle)
        cache.unlock(handle)
        cache.check()  # counts the heap's entries
    assert len(cache._leaves) <= 20


def test_a_long_path_of_short_edges_is_passed_a_block_at_a_time() -> None:
    cache = RadixPrefixCache(1, block_pages=16)
    tokens = np.arange(1000, dtype=np.int32)
    cache.insert(tokens, tokens + 1)
    for end in range(999, 0, -1):
        handle = cache.match(tokens[: end + 1]).handle
        cache.lock(handle)
        cache.unlock(handle)
    cache.check()
    root = next(iter(cache._roots.values()))
    parts = cache._walk(root, tokens.tobytes(), 1000)[2]
    assert len(parts) <= 1000 // 16 + 16
    assert cache.match(np.append(tokens, 0).astype(np.int32)).pages.tolist() == list(range(1, 1001))


def test_a_second_lock_does_not_walk_the_path() -> None:
    """Catches: locks counted on every node of the path, which a long path makes dear."""
    cache = RadixPrefixCache(1, block_pages=1)
    tokens = np.arange(500, dtype=np.int32)
    cache.insert(tokens[:400], tokens[:400] + 1)
    first = cache.match(tokens[:401]).handle
    cache.lock(first)
    second = cache.insert(tokens, tokens + 1).handle
    cache.lock(second)
    cache.unlock(first)
    node, holds = second.node, []
    while node.parent is not None:
        holds.append((node.locks, node.held_children))
        node = node.parent
    assert holds == [(1, 0)] + [(0, 1)] * 499
    assert cache.num_evictable_pages == 0
    cache.unlock(second)
    assert cache.num_evictable_pages == 500
    cache.check()


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_handle_from_before_a_split_locks_the_same_pages(split: int) -> None:
    """Catches: a handle that means the end of its node, which a split moves further down."""
    cache = RadixPrefixCache(1)
    cache.insert(array(1, 2, 3, 4), array(5, 6, 7, 8))
    handle = cache.match(array(1, 2, 9)).handle
    cache.insert(array(*range(1, split + 1), 9), np.arange(11, 12 + split, dtype=np.int32))
    cache.lock(handle)
    assert cache.pages_of(handle).tolist() == [5, 6]
    assert sorted(cache.evict(9)) == [7, 8, 11 + split]
    cache.check()


def test_a_parent_is_as_recently_used_as_its_children_were() -> None:
    """Catches: a time of use that counts for the end of the path only."""
    cache = RadixPrefixCache(1)
    cache.insert(array(1), array(1))
    kept = cache.insert(array(2), array(2)).handle
    cache.lock(kept)
    cache.insert(array(1, 3), array(9, 3))
    assert cache.evict(1).tolist() == [3], "the other leaf is locked"
    cache.unlock(kept)
    assert cache.evict(2).tolist() == [2, 1]


def test_a_split_of_a_locked_edge_leaves_both_parts_locked() -> None:
    cache = RadixPrefixCache(1)
    held = cache.insert(array(1, 2, 3), array(1, 2, 3)).handle
    cache.lock(held)
    cache.insert(array(1, 9), array(8, 9))
    upper = cache.match(array(1, 7)).handle
    cache.lock(upper)
    cache.check()
    cache.unlock(held)
    cache.check()
    assert cache.num_evictable_pages == 3
    cache.unlock(upper)
    assert sorted(cache.evict(9)) == [1, 2, 3, 9]


def test_what_is_evicted_is_not_looked_up_any_more() -> None:
    """Catches: a look-up past a block that leads to pages which belong to somebody else now."""
    cache = RadixPrefixCache(1, block_pages=2)
    tokens = np.arange(6, dtype=np.int32)
    cache.insert(tokens, tokens + 1)
    assert cache.evict(3).tolist() == [5, 6, 4]
    cache.check()
    query = np.append(tokens, 9).astype(np.int32)
    assert cache.match(query).pages.tolist() == [1, 2, 3]
    cache.insert(tokens, tokens + 11)
    assert cache.match(query).pages.tolist() == [1, 2, 3, 14, 15, 16]
    cache.check()
