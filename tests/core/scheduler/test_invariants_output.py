"""Invariants 9 to 12 (DESIGN section 7): what clients get, whatever happens beside them."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minisgl.message import StopFound
from support.lives import machine_tests
from support.schedules import Ask, answers, asks, plain, play, run, schedules, set_ups, submit
from support.scheduling import Harness


@example(plain(), plain(overlap=True), [Ask(0, (2,), 3), Ask(0, (2, 2), 8, ignore_eos=True)])
@example(plain(), plain(), [Ask(0, (5, 6, 2), 1, min_tokens=1)])
@example(  # the second one is retracted
    plain(),
    plain(rows=2, budget=5, cache="naive"),
    [Ask(0, (2, 3, 4, 5) * 2 + (2, 3, 2), 9), Ask(0, (2, 3, 4, 5) * 2 + (2, 3, 4, 2), 7)],
)
@given(set_ups(), set_ups(), schedules())
def test_invariant_09_no_set_up_changes_a_token_or_a_reason(
    one: dict[str, Any], other: dict[str, Any], schedule: list[Ask]
) -> None:
    """Overlap, budget, page size, cache, rows, kind of launch: equal streams and reasons.

    Catches: finish tested on lengths that the next launch had already advanced (clients lose
    their last token), a chunk computed twice, a retraction that drops or repeats a token,
    min_tokens counted from a wrong length, ignore_eos that is ignored.
    """
    expected = [(ask.tokens, [ask.reason]) for ask in schedule]
    assert answers(run(one, schedule), schedule) == expected
    assert answers(run(other, schedule), schedule) == expected


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler's life: requests, aborts and stop strings at any time, between any two steps.

    Exactly one terminal event a request and nothing after it (the harness checks both at every
    delivery); token counts are right to the last one.

    Catches: an abort that races the end of sequence and ends a request twice, a stop string that
    is found after the length was reached, tokens that are sent or counted past the cut, a request
    that ends while it is retracted and is resumed all the same.
    """

    @initialize(set_up=set_ups(max_spare=1))
    def start(self, set_up: dict[str, Any]) -> None:
        self.harness = Harness(**set_up)
        self.schedule: list[Ask] = []
        self.ended_by_us: dict[int, set[str]] = {}
        self.cuts: dict[int, set[int]] = {}

    @rule(ask=asks())
    def submit(self, ask: Ask) -> None:
        submit(self.harness, len(self.schedule), ask)
        self.schedule.append(ask)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.schedule)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        uid = which % len(self.schedule)
        self.harness.abort(uid)
        self.ended_by_us.setdefault(uid, set()).add("abort")

    @precondition(lambda self: self.schedule)
    @rule(which=st.integers(0, 20), back=st.integers(0, 2))
    def find_stop_string(self, which: int, back: int) -> None:
        """The detokenizer has seen the text so far and cuts it, perhaps a few tokens back."""
        uid = which % len(self.schedule)
        num_tokens = len(self.harness.clients[uid].tokens) - back
        if num_tokens > 0:
            self.harness.transport.inbox.append(StopFound(uid, num_tokens))
            self.ended_by_us.setdefault(uid, set()).add("stop")
            self.cuts.setdefault(uid, set()).add(num_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.finish()
        stats = {one.uid: one for one in self.harness.recorder.requests}
        assert len(stats) == len(self.harness.recorder.requests) == len(self.schedule)
        for uid, ask in enumerate(self.schedule):
            client = self.harness.clients[uid]
            [reason] = client.reasons
            counted = stats[uid].num_completion_tokens
            assert stats[uid].finish_reason == reason
            assert client.tokens == ask.tokens[: len(client.tokens)]
            if client.tokens == ask.tokens and reason == ask.reason and counted == len(ask.tokens):
                continue
            assert reason in self.ended_by_us[uid]
            if reason == "abort":
                assert counted == len(client.tokens)
            else:
                assert counted in self.cuts[uid]


def an_abort_comes_while_a_token_is_in_flight(state: Any) -> None:
    state.start(set_up=plain(overlap=True))
    state.submit(ask=Ask(0, (2,), 3))
    state.step(count=2)
    state.abort(which=0)
    state.step(count=1)


def a_stop_string_is_found_one_token_back(state: Any) -> None:
    state.start(set_up=plain())
    state.submit(ask=Ask(0, (2,), 3))
    state.step(count=2)
    state.find_stop_string(which=0, back=1)


TestInvariant10OneTerminalEvent = machine_tests(
    SchedulerMachine,
    an_abort_comes_while_a_token_is_in_flight,
    a_stop_string_is_found_one_token_back,
    steps=25,
)


@example(plain(lazy=True), 1, [Ask(0, (2, 2), 9), Ask(0, (2,), 1)])
@given(
    set_up=set_ups(max_spare=0, lazy=True),
    rows=st.integers(1, 3),
    schedule=schedules(max_size=9),
)
def test_invariant_11_writes_as_late_as_streams_allow_corrupt_no_recycled_row_or_page(
    set_up: dict[str, Any], rows: int, schedule: list[Ask]
) -> None:
    """Few rows and pages, so that each soon has a new owner, and an engine that runs at the end.

    Catches: a finished request's last token or write landing in a recycled row, a page that is
    given away while a launched step still writes to it, a staging buffer that is written again
    before its step has read it.
    """
    harness = run({**set_up, "rows": rows, "overlap": True}, schedule)
    assert answers(harness, schedule) == [(ask.tokens, [ask.reason]) for ask in schedule]


@example(plain(), [Ask(0, (2,), 1)], 0, -1)
@example(plain(), [Ask(0, (2, 3, 2), 1)], 0, 1)
@example(plain(overlap=True), [Ask(0, (2, 3), 5)], 0, -1)
@given(
    set_up=set_ups(max_spare=1, max_budget=8),
    schedule=schedules(max_size=5),
    victim=st.integers(0, 4),
    when=st.sampled_from([-1, 0, 1, 2, 3]) | st.integers(0, 10_000),
)
def test_invariant_12_an_abort_at_any_point_of_a_life_frees_everything_once(
    set_up: dict[str, Any], schedule: list[Ask], victim: int, when: int
) -> None:
    """Before its request, waiting, between chunks, in flight, at its last token, after its end.

    The harness recounts pages and rows after each step and at the end; the others lose nothing.

    Catches: an abort that overtakes its request and is forgotten, one during a prefill in flight
    that leaks pages or a lock, one that races the end of sequence and frees a row twice.
    """
    lifetime = Harness(**set_up)
    play(lifetime, schedule)
    victim %= len(schedule)
    last_step = len(lifetime.engine.plans) + 2
    when = min(when, when % (last_step + 1)) if when > 0 else when
    harness = Harness(**set_up)
    if when < 0:
        harness.abort(victim)
    for uid, ask in enumerate(schedule):
        submit(harness, uid, ask)
    for now in range(last_step + 1):
        if now == when:
            harness.abort(victim)
        harness.step()
    harness.finish()
    for uid, (tokens, reasons) in enumerate(answers(harness, schedule)):
        ask = schedule[uid]
        if uid == victim and (reasons == ["abort"] or when <= 0):
            assert reasons == ["abort"]
            assert tokens == ask.tokens[: len(tokens)]
            if ask.ends_with_a_token:
                assert len(tokens) < len(ask.tokens), "all tokens came, and yet it was aborted"
            assert when > 0 or not tokens
        else:
            assert (tokens, reasons) == (ask.tokens, [ask.reason])
