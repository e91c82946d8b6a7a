"""Invariants 1, 2, 3 and 8 (DESIGN section 7): whose a page is, under any schedule."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.engine.plan import BatchPlan
from minisgl.kvcache.naive_cache import NaivePrefixCache
from minisgl.kvcache.radix_cache import RadixPrefixCache
from minisgl.request import SamplingParams
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.table import TableManager
from support.audit import Audit, Feed, cached_pages
from support.fake_engine import generate
from support.lives import machine_tests
from support.schedules import Ask, plain, run, schedules, set_ups
from support.scheduling import Harness

MAX_LEN = 24


class PageLife(RuleBasedStateMachine):
    """Pages and rows without a scheduler: requests come, grow, share what they have, and go."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 5]), radix=st.booleans())
    def start(self, page_size: int, radix: bool) -> None:
        self.page_size = page_size
        self.table = TableManager(4, MAX_LEN, page_size)
        prefix_cache = (RadixPrefixCache if radix else NaivePrefixCache)(page_size)
        self.num_pages = -(-30 // page_size)  # few, so that prefixes are evicted
        self.cache = CacheManager(self.num_pages, page_size, prefix_cache, self.table)
        self.ranks_pages = np.zeros_like(self.table.pages)
        self.requests: list[RequestState] = []
        self.num_requests = 0

    def choose(self, which: int) -> RequestState:
        return self.requests[which % len(self.requests)]

    @precondition(lambda self: self.table.num_free)
    @rule(base=st.sampled_from([(2, 3, 4) * 5, (2, 3, 9) * 5]), length=st.integers(1, 15))
    def admit(self, base: tuple[int, ...], length: int) -> None:
        request = RequestState(
            uid=self.num_requests,
            order=self.num_requests,
            params=SamplingParams(),
            priority=0,
            seed=0,
            num_prompt_tokens=length,
            max_total_tokens=MAX_LEN,
            arrival=0.0,
            saved_tokens=np.array(base[:length], dtype=np.int32),
        )
        self.num_requests += 1
        self.table.take(request)
        cached = self.cache.attach_prefix(request)
        assert cached < length
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 3), num_tokens=st.integers(1, 9))
    def compute(self, which: int, num_tokens: int) -> None:
        """A chunk or a few tokens are launched and processed, if there are pages for them."""
        row = self.choose(which).row
        end = min(int(self.table.committed[row]) + num_tokens, MAX_LEN - 1)
        missing = self.cache.pages_for(end) - int(self.table.num_pages[row])
        if missing > self.cache.num_available:
            return
        self.cache.extend(row, end)
        self.table.launched[row] = self.table.committed[row] = end
        known = int(self.table.num_tokens[row])
        if end >= known:
            self.table.tokens[row, known : end + 1] = 2
            self.table.num_tokens[row] = end + 1

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 3))
    def share(self, which: int) -> None:
        self.cache.cache_prefix(self.choose(which))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        request = self.requests.pop(which % len(self.requests))
        self.cache.release(request)
        self.table.give_back(request)

    def pages_of(self, request: RequestState) -> list[int]:
        pages: list[int] = self.table.pages[
            request.row, : self.table.num_pages[request.row]
        ].tolist()
        return pages


class PagesAreConserved(PageLife):
    """Each page is free, cached or private to one request, and the counts sum to the pool.

    Catches: a page freed twice or with a prefix that the cache took over, pages nobody owns.
    """

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        free, cached = self.cache._free.pages().tolist(), cached_pages(self.cache.prefix_cache)
        private = [
            page
            for request in self.requests
            for page in self.pages_of(request)[request.num_shared_pages :]
        ]
        assert sorted(free + cached + private) == list(range(1, self.num_pages + 1))
        assert self.cache.num_free == len(free)


class TablesAreLive(PageLife):
    """No entry of a live row points at a free page, and ranks have the table that the host has.

    Catches: a matched prefix that is not locked and is evicted under its reader, duplicates that
    are freed and stay in a table, a table change that no plan tells the ranks about.
    """

    @invariant()
    def no_entry_points_at_a_free_page(self) -> None:
        free, cached = set(self.cache._free.pages().tolist()), cached_pages(self.cache.prefix_cache)
        for request in self.requests:
            pages = self.pages_of(request)
            assert not free & set(pages)
            assert set(pages[: request.num_shared_pages]) <= set(cached)

    @invariant()
    def ranks_know_the_table(self) -> None:
        writes = self.cache.take_writes()
        entries = [(row, column) for row, column, _ in writes.tolist()]
        assert len(set(entries)) == len(entries)
        self.ranks_pages[writes[:, 0], writes[:, 1]] = writes[:, 2]
        for request in self.requests:
            pages = self.pages_of(request)
            assert self.ranks_pages[request.row, : len(pages)].tolist() == pages


def a_prompt_is_computed_twice(state: Any) -> None:
    state.start(page_size=1, radix=True)
    for _ in range(2):
        state.admit(base=(2, 3, 4), length=1)
        state.compute(which=0, num_tokens=1)
        state.leave(which=0)


def a_prefix_is_in_use_when_pages_run_out(state: Any) -> None:
    state.start(page_size=1, radix=True)
    state.admit(base=(2, 3, 4), length=2)
    state.compute(which=0, num_tokens=2)
    state.leave(which=0)
    for _ in range(2):
        state.admit(base=(2, 3, 4), length=2)
    for which in (0, 1):
        for _ in range(MAX_LEN):
            state.compute(which=which, num_tokens=1)


TestInvariant01PagesAreConserved = machine_tests(
    PagesAreConserved, a_prompt_is_computed_twice, steps=30
)
TestInvariant02TablesAreLive = machine_tests(
    TablesAreLive, a_prefix_is_in_use_when_pages_run_out, steps=30
)


class Conservation(Audit):
    def stepped(self) -> None:
        owners = list(self.owners)
        private = [page for request in owners for page in self.private_pages_of(request)]
        everywhere = self.free_pages() + self.cached_pages() + private
        assert sorted(everywhere) == list(range(1, self.scheduler.cache.num_pages + 1))


@example(plain(), [Ask(0, (2,), 1), Ask(0, (2,), 1)])
@given(set_ups(), schedules(with_aborts=True))
def test_invariant_01_each_page_is_in_one_place_after_every_step(
    set_up: dict[str, Any], schedule: list[Ask]
) -> None:
    """Free, cached and private pages are the whole pool, each once, with a scheduler at work.

    Catches: an abort that races the end of sequence and frees a row twice, a retraction that
    loses pages, a cache that counts pages which a request still owns.
    """
    run(set_up, schedule, Conservation())


class LiveTables(Audit):
    def stepped(self) -> None:
        free, cached = set(self.free_pages()), set(self.cached_pages())
        for request in self.owners:
            assert not free & set(self.committed_pages_of(request)), (
                "a live table names a free page"
            )
            assert set(self.shared_pages_of(request)) <= cached

    def launched(self, plan: BatchPlan, feeds: list[Feed]) -> None:
        # The same of the table that the device reads, which the plans have written.
        free, cached = set(self.free_pages()), set(self.cached_pages())
        for feed in feeds:
            request = self.scheduler.table.owner(feed.row)
            used = self.scheduler.cache.pages_for(feed.start + feed.length)
            pages = self.follower.pages[feed.row, :used].tolist()
            assert not free & set(pages), "a launch reads a free page"
            assert set(pages) <= cached | set(self.private_pages_of(request))


@example(plain(), [Ask(0, (2,), 1), Ask(0, (2,), 2)])
@given(set_ups(max_spare=1), schedules(with_aborts=True))
def test_invariant_02_no_live_table_entry_points_at_a_free_page(
    set_up: dict[str, Any], schedule: list[Ask]
) -> None:
    """Neither the host's table nor, at a launch, the device's; both lie below committed length.

    Catches: duplicate prefixes, inserted in one batch, whose freed pages stay in a live table; a
    prefix that is evicted under a request because the match was not locked.
    """
    run({**set_up, "cache": "radix"}, schedule, LiveTables())


class WriteSlots(Audit):
    def launched(self, plan: BatchPlan, feeds: list[Feed]) -> None:
        cached, size = set(self.cached_pages()), self.scheduler.cache.page_size
        free = set(self.free_pages())
        slots: list[int] = []
        for feed in feeds:
            request = self.scheduler.table.owner(feed.row)
            assert request.terminal is None, "a request that ended is launched"
            assert not request.retracting
            private = set(self.private_pages_of(request))
            for position in range(feed.start, feed.start + feed.length):
                page = int(self.follower.pages[feed.row, position // size])
                assert page > 0, "a real row writes to the dummy page"
                assert page in private - cached - free, "a page is written by who does not own it"
                slots.append(page * size + position % size)
        assert len(set(slots)) == len(slots), "two tokens of a step go to one slot"


@example(plain(), [Ask(0, (2,), 1), Ask(0, (2,), 3, abort_after=2)])
@example(plain(rows=2), [Ask(0, (2,), 3), Ask(0, (2,), 2)])
@given(set_ups(), schedules(with_aborts=True))
def test_invariant_03_write_slots_are_distinct_and_owned_by_the_writer(
    set_up: dict[str, Any], schedule: list[Ask]
) -> None:
    """What a step writes lies in private pages of its rows: never shared, cached or free.

    Catches: a prompt that is matched into a part page and writes over the other owner's tokens,
    a row that is launched after its end, a page given to two rows.
    """
    run(set_up, schedule, WriteSlots())


@example(  # each fits alone; together they need pages that are not there
    plain(budget=5, cache="naive"),
    2,
    [
        Ask(0, (2,), 1),
        Ask(0, (2, 3, 4, 5) * 2 + (2, 3, 2), 8),
        Ask(0, (2, 3, 4, 5) * 3 + (2,) * 3, 5),
    ],
)
@example(
    plain(),
    2,
    [
        Ask(0, (2, 3, 4, 5) * 3 + (2, 2), 12, ignore_eos=True),
        Ask(0, (2,), 1),
        Ask(0, (2, 3, 2), 12, priority=1),
    ],
)
@example(
    plain(page_size=3, num_pages=12, overlap=True),
    2,
    [Ask(0, (2,), 1), Ask(0, (2, 3, 4, 5) * 3 + (2,) * 3, 11, ignore_eos=True), Ask(0, (2, 2), 9)],
)
@given(set_ups(max_spare=0), st.integers(2, 5), schedules(min_size=3, last_arrival=3))
def test_invariant_08_admission_is_sound_for_any_page_size_and_order_of_ends(
    set_up: dict[str, Any], rows: int, schedule: list[Ask]
) -> None:
    """A pool that just holds one request serves all of them in full, whoever ends first.

    When pages run out, somebody is retracted, but never the oldest, so that there is progress.

    Catches: admission that forgot page rounding and runs out of pages in the middle, retraction
    that loses or repeats a token, requests that throw one another out for ever.
    """
    # The oldest has the lowest priority, and yet it must never be the one to go.
    oldest = replace(schedule[0], arrival=0, priority=0)
    schedule = [oldest, *(replace(ask, arrival=ask.arrival + 1) for ask in schedule[1:])]
    harness = run({**set_up, "rows": rows}, schedule)
    for uid, ask in enumerate(schedule):
        assert harness.clients[uid].tokens == ask.tokens
        assert harness.clients[uid].reasons == [ask.reason]
    [stats] = [one for one in harness.recorder.requests if one.uid == 0]
    assert stats.num_retractions == 0


@example(page_size=1, num_pages=1, max_seq_len=3, sizes=[(1, 2)])
@given(
    page_size=st.integers(1, 256),
    num_pages=st.integers(1, 40),
    max_seq_len=st.integers(2, 60),
    sizes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=5),
)
def test_invariant_08_what_can_never_fit_is_refused_at_once_and_all_else_is_served(
    page_size: int, num_pages: int, max_seq_len: int, sizes: list[tuple[int, int]]
) -> None:
    """The border is exact: prompt and output fit the context, and all but the last token the pool.

    Catches: a queue head that could never be admitted and blocks all others for ever, a request
    at the very border that is refused, or accepted and never finished.
    """
    harness = Harness(page_size=page_size, num_pages=num_pages, max_seq_len=max_seq_len)
    limit = min(max_seq_len, num_pages * page_size + 1)
    for uid, (length, max_tokens) in enumerate(sizes):
        harness.submit(uid, [uid + 2] * length, max_tokens=max_tokens, ignore_eos=True)
    harness.step()
    for uid, (length, max_tokens) in enumerate(sizes):
        fits = length + max_tokens <= limit
        assert fits == (harness.clients[uid].reasons != ["error"])
        if not fits:
            [message] = harness.clients[uid].failures
            assert str(limit) in message, "the refusal has the number"
    harness.finish()
    for uid, (length, max_tokens) in enumerate(sizes):
        if harness.clients[uid].reasons != ["error"]:
            expected = generate([uid + 2] * length, max_tokens, stop_ids=frozenset())
            assert harness.clients[uid].tokens == expected
