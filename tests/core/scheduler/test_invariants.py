"""Property tests of the scheduler's invariants (DESIGN section 7), against a late fake engine."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_engine import EOS, generate
from support.scheduling import Harness


@dataclass(frozen=True)
class Ask:
    """One request of a schedule."""

    arrival: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    min_tokens: int = 0
    abort_after: int | None = None


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Prompts that often share prefixes, of a tiny alphabet."""
    base = draw(st.sampled_from([(2, 3, 4, 5) * 6, (2, 3, 9, 9) * 6, (7,) * 24, (5, 6) * 12]))
    tail = draw(st.lists(st.integers(2, 9), max_size=3))
    return (*base[: draw(st.integers(0, 20))], *tail, draw(st.integers(2, 9)))


@st.composite
def asks(draw: st.DrawFn, *, with_aborts: bool = False) -> Ask:
    max_tokens = draw(st.integers(1, 12))
    return Ask(
        arrival=draw(st.integers(0, 12)),
        prompt=draw(prompts()),
        max_tokens=max_tokens,
        priority=draw(st.integers(0, 2)),
        min_tokens=draw(st.integers(0, max_tokens)),
        abort_after=draw(st.one_of(st.none(), st.integers(0, 12))) if with_aborts else None,
    )


@st.composite
def set_ups(draw: st.DrawFn) -> dict[str, object]:
    """Everything that must not change a token."""
    page_size = draw(st.sampled_from([1, 2, 3, 4, 16, 64, 256]))
    # One request must fit into the pool: 24 prompt tokens and 12 more.
    least = -(-36 // page_size)
    return {
        "page_size": page_size,
        "num_pages": least + draw(st.integers(0, 2 * least)),
        "max_seq_len": 40,
        "rows": draw(st.integers(1, 5)),
        "budget": draw(st.integers(1, 40)),
        "overlap": draw(st.booleans()),
        "mixed": draw(st.booleans()),
        "cache": draw(st.sampled_from(["radix", "naive"])),
        "lazy": draw(st.booleans()),
        "policy": draw(st.sampled_from(["decode-first", "prefill-first"])),
        "order": draw(st.sampled_from(["fcfs", "longest-prefix"])),
    }


def run(set_up: dict[str, object], schedule: list[Ask]) -> Harness:
    harness = Harness(**set_up)  # type: ignore[arg-type]
    last = max((ask.arrival + (ask.abort_after or 0) for ask in schedule), default=0)
    for now in range(last + 1):
        for uid, ask in enumerate(schedule):
            if ask.arrival == now:
                harness.submit(
                    uid,
                    list(ask.prompt),
                    ask.priority,
                    max_tokens=ask.max_tokens,
                    min_tokens=ask.min_tokens,
                )
            if ask.abort_after is not None and ask.arrival + ask.abort_after == now:
                harness.abort(uid)
        harness.step()
    harness.finish()
    return harness


def expected(ask: Ask) -> list[int]:
    return generate(list(ask.prompt), ask.max_tokens, min_tokens=ask.min_tokens)


@given(set_ups(), st.lists(asks(), min_size=1, max_size=7))
@settings(max_examples=300, deadline=None)
def test_invariants_1_2_3_8_9_11_any_schedule_gives_the_same_tokens(
    set_up: dict[str, object], schedule: list[Ask]
) -> None:
    """Pages are conserved, live tables and write slots are right, and no schedule changes a token.

    Catches: freed duplicates in a live table, late writes into recycled rows or pages, lengths
    read ahead of the commit, admission without page rounding, retraction that loses a token.
    """
    harness = run(set_up, schedule)
    for uid, ask in enumerate(schedule):
        client, tokens = harness.clients[uid], expected(ask)
        assert client.tokens == tokens
        assert client.reasons == ["stop" if tokens[-1] == EOS else "length"]


@given(set_ups(), st.lists(asks(with_aborts=True), min_size=1, max_size=7))
@settings(max_examples=300, deadline=None)
def test_invariants_10_12_one_terminal_event_whenever_the_abort_comes(
    set_up: dict[str, object], schedule: list[Ask]
) -> None:
    """An abort at any point of a life yields one terminal event and frees each thing once.

    Catches: an abort that races the end of sequence, one during a prefill in flight, one that
    comes twice or after the end, and tokens sent after the end.
    """
    harness = run(set_up, schedule)
    for uid, ask in enumerate(schedule):
        client, tokens = harness.clients[uid], expected(ask)
        assert len(client.reasons) == 1
        assert client.tokens == tokens[: len(client.tokens)]
        if client.reasons == ["abort"]:
            assert ask.abort_after is not None
        else:
            assert client.tokens == tokens
    stats = {one.uid: one for one in harness.recorder.requests}
    assert len(stats) == len(harness.recorder.requests) == len(schedule)
    for uid, one in stats.items():
        assert one.num_completion_tokens == len(harness.clients[uid].tokens)


@given(set_ups(), st.lists(asks(), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_invariant_16_chunks_concatenate_to_the_prompt(
    set_up: dict[str, object], schedule: list[Ask]
) -> None:
    """Between admission and the last chunk a row's chunks are contiguous; budgets hold.

    Catches: a chunk computed twice or left out, output from an inner chunk, a budget overrun.
    """
    harness = run(set_up, schedule)
    budget, page_size = int(set_up["budget"]), int(set_up["page_size"])  # type: ignore[call-overload]
    unfinished: dict[int, int] = {}  # row: where its next chunk has to start
    for plan in harness.engine.plans:
        for row in plan.added["row"].tolist():
            unfinished.pop(row, None)
        assert plan.num_tokens <= max(budget, plan.num_decode_rows + page_size)
        assert len(plan.token_ids) == plan.chunks["length"].sum()
        for row, start, length, sampled in plan.chunks.tolist():
            if row in unfinished:
                assert start == unfinished.pop(row), "a position is left out or done twice"
            else:
                assert start % page_size == 0, "a cached prefix is whole pages"
            if not sampled:
                unfinished[row] = start + length


@given(st.integers(1, 16), st.integers(2, 6), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_invariant_15_nobody_starves_under_endless_arrivals(
    page_size: int, rows: int, budget: int
) -> None:
    """Every running request gets a token in every step or two, and the first arrivals finish.

    Catches: prefills that always win, an admission that always prefers the newcomer.
    """
    harness = Harness(
        page_size=page_size,
        num_pages=-(-200 // page_size),
        max_seq_len=40,
        rows=rows,
        budget=budget,
    )
    bound = 30 + 12 * (24 // min(budget, 24) + 12)
    last_token: dict[int, tuple[int, int]] = {}  # uid: number of tokens, step of the newest
    for now in range(bound):
        harness.submit(now, [2, 3, 4, 5] * 3 + [now % 8 + 2], max_tokens=6, min_tokens=6)
        harness.step()
        for uid, client in harness.clients.items():
            count, since = last_token.get(uid, (0, now))
            if len(client.tokens) > count:
                last_token[uid] = (len(client.tokens), now)
            elif client.tokens and not client.reasons:
                assert now - since <= 2, f"request {uid} runs and gets no token"
    assert harness.clients[0].reasons
    assert harness.clients[1].reasons
    ended = [stats.uid for stats in harness.recorder.requests]
    assert ended == sorted(ended), "equal requests end in the order of their arrival"


def test_a_retracted_request_is_resumed_with_the_same_output() -> None:
    harness = Harness(page_size=1, num_pages=30, max_seq_len=28, rows=4, budget=30)
    prompt = [2, 3, 4, 5, 6, 7]
    for uid in range(4):
        harness.submit(uid, [*prompt, uid + 2], max_tokens=18, min_tokens=18)
    harness.finish()
    assert harness.scheduler.num_retractions > 0
    for uid in range(4):
        assert harness.clients[uid].tokens == generate([*prompt, uid + 2], 18, min_tokens=18)
    retracted = {stats.uid: stats.num_retractions for stats in harness.recorder.requests}
    assert retracted[0] == 0, "the oldest request is never retracted"


def test_low_priority_is_retracted_before_new() -> None:
    harness = Harness(page_size=1, num_pages=42, max_seq_len=28, rows=4, budget=40)
    for uid, priority in enumerate((5, 0, 5)):
        harness.submit(uid, [uid + 2] * 7, priority, max_tokens=14, min_tokens=14)
    harness.finish()
    retracted = {stats.uid: stats.num_retractions for stats in harness.recorder.requests}
    assert retracted[1] > 0
    assert retracted[0] == retracted[2] == 0


def test_equal_prompts_are_computed_once_when_the_first_is_done() -> None:
    harness = Harness(page_size=4, num_pages=40)
    prompt = [2, 3, 4, 5] * 4
    harness.submit(0, prompt, max_tokens=2)
    harness.finish()
    harness.submit(1, prompt, max_tokens=2)
    harness.finish()
    assert harness.clients[1].num_cached == 12, "all whole pages but the last token's"
    assert harness.clients[0].tokens == harness.clients[1].tokens


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    harness = Harness(max_seq_len=20)
    harness.submit(0, [2] * 25, max_tokens=1)
    harness.submit(1, [2] * 10, max_tokens=15)
    harness.submit(2, [2] * 10, max_tokens=10)
    harness.submit(3, [2, 99], max_tokens=1)
    harness.submit(4, [], max_tokens=1)
    harness.finish()
    [failure] = harness.clients[0].failures
    assert "prompt has 25 tokens; this server takes at most 19" in failure
    assert "leaves room for 10" in harness.clients[1].failures[0]
    assert harness.clients[2].tokens == generate([2] * 10, 10)
    assert "token id 99" in harness.clients[3].failures[0]
    assert "at least one token" in harness.clients[4].failures[0]


def test_an_abort_that_overtakes_its_request_is_remembered() -> None:
    harness = Harness()
    harness.abort(7)
    harness.step()
    harness.submit(7, [2, 3], max_tokens=5)
    harness.finish()
    assert harness.clients[7].reasons == ["abort"]
    assert harness.clients[7].tokens == []


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    harness = Harness(fail_at=lambda plan: plan.number == 2)
    harness.submit(0, [2, 3, 4], max_tokens=12, min_tokens=12)
    harness.step()
    harness.step()
    harness.submit(1, [5, 6, 7], max_tokens=4)
    harness.step()
    harness.finish()
    harness.submit(2, [5, 6, 7], max_tokens=4)
    harness.finish()
    assert harness.clients[0].reasons == ["error"]
    assert "injected failure" in harness.clients[0].failures[0]
    assert harness.clients[2].tokens == generate([5, 6, 7], 4)


def test_stop_tokens_of_a_request_end_it() -> None:
    harness = Harness()
    free = generate([4, 4], 10, stop_ids=frozenset())
    stop = free[3]
    harness.submit(0, [4, 4], max_tokens=10, ignore_eos=True, stop_token_ids=(stop,))
    harness.finish()
    assert harness.clients[0].tokens == free[: free.index(stop) + 1]
    assert harness.clients[0].reasons == ["stop"]


def test_without_max_tokens_all_the_room_is_used() -> None:
    harness = Harness(max_seq_len=20)
    harness.submit(0, [4, 4], ignore_eos=True)
    harness.finish()
    assert len(harness.clients[0].tokens) == 18
    assert harness.clients[0].reasons == ["length"]


def test_the_oldest_request_is_never_retracted_even_with_the_lowest_priority() -> None:
    harness = Harness(page_size=1, num_pages=30, max_seq_len=28, rows=4, budget=40)
    harness.submit(0, [2] * 7, 0, max_tokens=18, min_tokens=18)
    harness.step()
    for uid in (1, 2):
        harness.submit(uid, [uid + 3] * 7, 5, max_tokens=18, min_tokens=18)
    harness.finish()
    retracted = {stats.uid: stats.num_retractions for stats in harness.recorder.requests}
    assert retracted[0] == 0
    assert retracted[1] + retracted[2] > 0


def test_invariant_15_a_large_request_is_overtaken_only_so_often() -> None:
    """Catches: skip-ahead without ageing, under which small requests pass a large one for ever."""
    harness = Harness(page_size=1, num_pages=30, max_seq_len=30, rows=6, budget=30, cache="naive")
    for uid in range(12):  # one after the other, so that they never all end together
        harness.submit(500 + uid, [uid % 8 + 2] * 3, max_tokens=6, min_tokens=6)
        harness.step()
    harness.submit(1000, [9] * 24, max_tokens=4, min_tokens=4)
    for now in range(400):
        harness.submit(10 + now, [now % 8 + 2] * 3, max_tokens=6, min_tokens=6)
        harness.step()
        if harness.clients[1000].reasons:
            break
    assert harness.clients[1000].tokens == generate([9] * 24, 4, min_tokens=4)


def test_what_a_failed_step_should_have_computed_is_never_shared() -> None:
    """Catches: a prefix cached by launched instead of committed lengths."""
    prompt = [2, 3, 4, 5, 6, 7, 8, 9] * 2
    harness = Harness(page_size=2, budget=4, fail_at=lambda plan: plan.number == 2)
    harness.submit(0, prompt, max_tokens=4)
    harness.finish()
    assert harness.clients[0].reasons == ["error"]
    harness.submit(1, prompt, max_tokens=4)
    harness.finish()
    assert harness.clients[1].num_cached == 8, "the two chunks before it were computed"
    assert harness.clients[1].tokens == generate(prompt, 4)
