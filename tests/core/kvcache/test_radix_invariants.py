"""Invariants 4 to 7 (DESIGN section 7): the radix tree against a brute-force prefix cache."""

from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.kvcache.radix_cache import RadixPrefixCache
from support.lives import machine_tests
from support.plain_cache import PlainCache, Prefix

# Long common beginnings: otherwise edges are short, and few of them are ever split.
TOKENS = st.builds(
    lambda base, length, tail: [*base[:length], *tail],
    st.sampled_from([[0, 1, 2] * 5, [0, 1, 2, 2] * 4, [0] * 15]),
    st.integers(0, 13),
    st.lists(st.integers(0, 2), max_size=3),
)
UNSEEN = 9
"""Stands for the one token that a match always leaves."""


def ids(tokens: list[int] | Prefix) -> Any:
    return np.array(tokens, dtype=np.int32)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Any life of a prefix cache: inserts, matches, locks, unlocks and evictions.

    The brute-force model follows along; what has to hold is said by the subclasses.
    """

    @initialize(page_size=st.sampled_from([1, 2, 3]), block_pages=st.sampled_from([1, 2, 3, 256]))
    def start(self, page_size: int, block_pages: int) -> None:
        self.page_size = page_size
        self.cache = RadixPrefixCache(page_size, block_pages=block_pages)
        self.plain = PlainCache(page_size)
        self.held: list[tuple[Any, list[int]]] = []
        """Handles with the pages that they came with, in the order of ``plain.locked``."""
        self.next_page = 1

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        whole = tokens[: len(tokens) // self.page_size * self.page_size]
        own = list(range(self.next_page, self.next_page + len(whole) // self.page_size))
        self.next_page += len(own)
        pages = self.cache.insert(ids(whole), ids(own)).pages.tolist()
        self.inserted(pages, self.plain.insert(whole, own))

    @rule(tokens=TOKENS)
    def lock(self, tokens: list[int]) -> None:
        match = self.cache.match(ids(tokens))
        self.cache.lock(match.handle)
        self.held.append((match.handle, match.pages.tolist()))
        self.plain.lock(self.plain.match(tokens))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        which %= len(self.held)
        self.cache.unlock(self.held.pop(which)[0])
        self.plain.locked.pop(which)

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int) -> None:
        num_evictable = self.plain.num_evictable
        pages = self.cache.evict(num_pages).tolist()
        gone = self.plain.forget(pages)
        self.evicted(pages, gone, min(num_pages, num_evictable))

    def inserted(self, pages: list[int], expected: list[int]) -> None:
        """Judge an insertion by the model's canonical pages."""

    def evicted(self, pages: list[int], gone: list[Prefix], num_owed: int) -> None:
        """Judge an eviction: ``gone`` are the model's prefixes of the evicted pages."""


class TreeAccounting(PrefixCacheMachine):
    """Evictable and locked sizes equal a recount; every edge is a whole number of pages, not 0.

    Catches: a split that forgets or doubles a lock, an eviction that leaves the count as it was,
    an emptied leaf that stays in the tree: admission then reckons with pages that do not exist.
    """

    @invariant()
    def the_books_equal_a_recount(self) -> None:
        self.cache.check()
        assert self.cache.num_pages == len(self.plain.pages)
        assert self.cache.num_evictable_pages == self.plain.num_evictable

    def teardown(self) -> None:
        for handle, _ in self.held:
            self.cache.unlock(handle)
        assert self.cache.num_evictable_pages == self.cache.num_pages, "a lock is left over"
        assert len(self.cache.evict(10**6)) == len(self.plain.pages)
        self.cache.check()


class Handles(PrefixCacheMachine):
    """A handle taken before any later inserts and splits still yields the same pages.

    Catches: a split that leaves an old handle with the wrong half (a running request's pages are
    evicted), an insertion that replaces canonical pages by the newcomer's duplicates.
    """

    @initialize()
    def forget(self) -> None:
        self.taken: list[tuple[Any, list[int], Prefix]] = []
        """Handles that are not locked yet; only what evicts ends their life."""

    @rule(tokens=TOKENS)
    def take(self, tokens: list[int]) -> None:
        match = self.cache.match(ids(tokens))
        prefixes = self.plain.match(tokens)
        self.taken.append((match.handle, match.pages.tolist(), prefixes[-1] if prefixes else ()))

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 100))
    def lock_taken(self, which: int) -> None:
        handle, pages, prefix = self.taken.pop(which % len(self.taken))
        self.cache.lock(handle)
        self.held.append((handle, pages))
        self.plain.lock(self.plain.prefixes(list(prefix)))

    @invariant()
    def a_held_prefix_keeps_its_pages(self) -> None:
        for prefix, (handle, pages) in zip(self.plain.locked, self.held, strict=True):
            assert self.cache.pages_of(handle).tolist() == pages
            assert self.cache.match(ids([*prefix, UNSEEN])).pages.tolist() == pages

    def inserted(self, pages: list[int], expected: list[int]) -> None:
        assert pages == expected, "the canonical pages are those that were there first"

    def evicted(self, pages: list[int], gone: list[Prefix], num_owed: int) -> None:
        held = {page for _, pages in self.held for page in pages}
        assert not held & set(pages)
        self.taken.clear()


class Eviction(PrefixCacheMachine):
    """Eviction takes unlocked leaves only, least recently used first, at least what was asked.

    Catches: a locked prefix that is evicted under a running request, a page that goes before the
    pages behind it, an order by insertion instead of use, and less room than was counted on.
    """

    def evicted(self, pages: list[int], gone: list[Prefix], num_owed: int) -> None:
        assert len(pages) == len(set(pages)) == len(gone), "each page was cached, and goes once"
        assert len(pages) >= num_owed
        assert not any(self.plain.is_locked(prefix) for prefix in gone)
        for prefix in self.plain.pages:
            parent = prefix[: -self.page_size]
            assert not parent or parent in self.plain.pages, "a page went before those behind it"
        could_go = [leaf for leaf in self.plain.leaves() if not self.plain.is_locked(leaf)]
        for kept in could_go:
            for prefix in gone:
                assert self.plain.used[kept] >= self.plain.used[prefix], "a more recent one went"


def one_page_comes_and_goes(state: Any) -> None:
    state.start(page_size=1, block_pages=1)
    state.insert(tokens=[0])
    state.evict(num_pages=1)


def a_locked_edge_is_split(state: Any) -> None:
    state.start(page_size=1, block_pages=2)
    state.insert(tokens=[0, 1])
    state.lock(tokens=[0, 1, 0])
    state.insert(tokens=[0])


def a_prefix_comes_twice(state: Any) -> None:
    state.forget()
    state.start(page_size=1, block_pages=1)
    state.insert(tokens=[0])
    state.insert(tokens=[0])


def a_handle_ends_within_an_edge(state: Any) -> None:
    state.forget()
    state.start(page_size=1, block_pages=2)
    state.insert(tokens=[0, 1])
    state.lock(tokens=[0, 1])


def a_locked_leaf_is_all_there_is(state: Any) -> None:
    state.start(page_size=1, block_pages=1)
    state.insert(tokens=[0])
    state.lock(tokens=[0, 1])
    state.evict(num_pages=1)


def the_older_leaf_was_used_last(state: Any) -> None:
    state.start(page_size=1, block_pages=1)
    state.insert(tokens=[0, 0])
    state.insert(tokens=[0, 1])
    state.lock(tokens=[0, 0, 0])
    state.unlock(which=0)
    state.evict(num_pages=1)


def two_pages_of_one_path_go(state: Any) -> None:
    state.start(page_size=1, block_pages=1)
    state.insert(tokens=[0, 0])
    state.evict(num_pages=2)


TestInvariant04TreeAccounting = machine_tests(
    TreeAccounting, one_page_comes_and_goes, a_locked_edge_is_split, steps=30
)
TestInvariant05HandlesKeepTheirPages = machine_tests(
    Handles, a_prefix_comes_twice, a_handle_ends_within_an_edge, steps=30
)
TestInvariant07EvictionIsLeastRecentlyUsed = machine_tests(
    Eviction,
    a_locked_leaf_is_all_there_is,
    the_older_leaf_was_used_last,
    two_pages_of_one_path_go,
    steps=30,
)


@example(page_size=1, life=[([0], True), ([0], False)])
@example(page_size=1, life=[([0, 1], True), ([0, 0], True), ([0, 1, 2], False)])
@given(
    page_size=st.sampled_from([1, 2, 3]),
    # A sequence is inserted, or only asked for.
    life=st.lists(st.tuples(TOKENS, st.booleans()), max_size=12),
)
def test_invariant_06_a_match_is_the_longest_whole_page_prefix_and_leaves_no_trace(
    page_size: int, life: list[tuple[list[int], bool]]
) -> None:
    """At most len - 1 tokens; a twin cache that is never asked evicts in the same order.

    Catches: a fully cached prompt with no token left to compute (there are no logits then), a
    part page that is shared, a look-up without an owner that keeps a prefix from eviction.
    """
    cache, twin = RadixPrefixCache(page_size), RadixPrefixCache(page_size)
    plain = PlainCache(page_size)
    next_page = 1
    for tokens, is_insert in life:
        match = cache.match(ids(tokens))
        assert match.pages.tolist() == [plain.pages[prefix] for prefix in plain.match(tokens)]
        assert len(match.pages) * page_size <= max(len(tokens) - 1, 0)
        if is_insert:
            whole = tokens[: len(tokens) // page_size * page_size]
            own = list(range(next_page, next_page + len(whole) // page_size))
            next_page += len(own)
            plain.insert(whole, own)
            cache.insert(ids(whole), ids(own))
            twin.insert(ids(whole), ids(own))
    assert cache.num_evictable_pages == twin.num_evictable_pages == len(plain.pages)
    while plain.pages:
        pages = cache.evict(1).tolist()
        assert pages == twin.evict(1).tolist()
        plain.forget(pages)
