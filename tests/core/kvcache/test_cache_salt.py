"""Salts separate tenants in the radix cache, and leave nothing behind."""

import gc
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minisgl.kvcache.naive_cache import NaivePrefixCache
from minisgl.kvcache.radix_cache import RadixPrefixCache

SALTS = st.sampled_from([None, "", "a", "b"])


@given(
    page_size=st.sampled_from([1, 2, 3]),
    block_pages=st.sampled_from([1, 2, 256]),
    asks=st.lists(st.tuples(SALTS, st.lists(st.integers(0, 1), max_size=12)), max_size=30),
    evictions=st.lists(st.integers(1, 5), max_size=5),
)
def test_each_salt_sees_a_cache_of_its_own(
    page_size: int,
    block_pages: int,
    asks: list[tuple[str | None, list[int]]],
    evictions: list[int],
) -> None:
    """One salted cache answers as one cache a salt would. Catches: a key that leaves the salt out,
    a block that leads into another tenant's tree."""
    together = RadixPrefixCache(page_size, block_pages=block_pages)
    apart = {salt: RadixPrefixCache(page_size) for salt in (None, "", "a", "b")}
    owner: dict[int, str | None] = {}
    next_page = 1
    for salt, tokens in asks:
        num_pages = len(tokens) // page_size
        data = np.array(tokens[: num_pages * page_size], dtype=np.int32)
        pages = np.arange(next_page, next_page + num_pages, dtype=np.int32)
        next_page += num_pages
        owner.update(dict.fromkeys(pages.tolist(), salt))
        expected = apart[salt].insert(data, pages).pages.tolist()
        assert together.insert(data, pages, salt).pages.tolist() == expected
        query = np.array([*tokens, 0], dtype=np.int32)
        for other, alone in apart.items():
            found = together.match(query, other).pages.tolist()
            assert found == alone.match(query).pages.tolist()
            assert all(owner[page] == other for page in found), "a page of another salt"
        together.check()
    for num_pages in evictions:
        available = together.num_evictable_pages
        assert len(together.evict(num_pages)) == min(num_pages, available)
        together.check()
    together.evict(together.num_pages)
    assert (together.num_pages, together.num_salts) == (0, 0)


def test_a_lock_keeps_its_own_salt_only() -> None:
    cache = RadixPrefixCache(1)
    tokens = np.array([1, 2, 3], dtype=np.int32)
    kept = cache.insert(tokens, tokens + 10, "kept")
    cache.insert(tokens, tokens + 20, "other")
    cache.lock(kept.handle)
    assert sorted(cache.evict(6)) == [21, 22, 23]
    assert cache.num_salts == 1
    cache.unlock(kept.handle)
    assert len(cache.evict(6)) == 3
    assert cache.num_salts == 0


def test_an_empty_match_of_an_unknown_salt_can_be_locked() -> None:
    cache = RadixPrefixCache(1)
    handle = cache.match(np.array([1, 2], dtype=np.int32), "never seen").handle
    cache.lock(handle)
    cache.unlock(handle)
    assert cache.num_salts == 0


def test_endless_salts_do_not_leak() -> None:
    """Catches: a tree kept for each salt that was ever seen."""
    cache = RadixPrefixCache(1)
    tokens = np.arange(20, dtype=np.int32)

    def tenants(first: int, count: int) -> None:
        for number in range(first, first + count):
            salt = f"tenant {number}"
            handle = cache.match(tokens, salt).handle
            cache.lock(handle)
            held = cache.insert(tokens, tokens + 1, salt).handle
            cache.lock(held)
            cache.unlock(handle)
            cache.unlock(held)
            cache.evict(20)

    tenants(0, 200)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tenants(200, 2000)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert cache.num_salts == 0
    assert grown < 20_000, "bytes; one tree alone takes over 500"


def test_the_naive_cache_takes_salts() -> None:
    cache = NaivePrefixCache(1)
    tokens = np.array([1, 2], dtype=np.int32)
    assert cache.insert(tokens, tokens, "a").pages.tolist() == []
    assert cache.match(tokens, "a").pages.tolist() == []
