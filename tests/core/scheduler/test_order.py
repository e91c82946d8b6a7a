"""Order of admission: priority, age, and the longest cached prefix within a bounded window."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.request import SamplingParams
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.waiting import PREFIX_WINDOW, SKIP_LIMIT, WaitingQueue
from support.examples import scaled
from support.fake_engine import generate
from support.scheduling import Harness


def request(order: int, priority: int = 0) -> RequestState:
    return RequestState(
        uid=order,
        order=order,
        params=SamplingParams(),
        priority=priority,
        seed=0,
        num_prompt_tokens=1,
        max_total_tokens=2,
        arrival=0.0,
        saved_tokens=None,  # type: ignore[arg-type]  # the queue never looks at them
    )


def admissions(harness: Harness) -> list[int]:
    """Uids in the order in which they were admitted: every request has one token to make."""
    return [stats.uid for stats in harness.recorder.requests]


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=20), st.sampled_from([1, 3]))
def test_priority_then_age_orders_admission(priorities: list[int], rows: int) -> None:
    """Catches: a queue by age alone, a low number taken for the high priority."""
    harness = Harness(rows=rows, num_pages=200, budget=1)
    for uid, priority in enumerate(priorities):
        harness.submit(uid, [uid % 8 + 2], priority, max_tokens=1)
    harness.finish()
    expected = sorted(range(len(priorities)), key=lambda uid: (-priorities[uid], uid))
    assert admissions(harness) == expected


def loaded(order: str, *, rows: int = 1) -> Harness:
    """A scheduler whose cache holds one long prompt."""
    harness = Harness(page_size=2, num_pages=400, rows=rows, budget=64, order=order)  # type: ignore[arg-type]
    harness.submit(1000, [5] * 21, max_tokens=1)
    harness.finish()
    harness.recorder.requests.clear()
    return harness


@pytest.mark.parametrize("order", ["fcfs", "longest-prefix"])
def test_longest_prefix_goes_first_within_a_priority(order: str) -> None:
    harness = loaded(order)
    harness.submit(0, [2] * 21, max_tokens=1)
    harness.submit(1, [5] * 9 + [3] * 9, max_tokens=1)
    harness.submit(2, [5] * 21, max_tokens=1)
    harness.submit(3, [7] * 21, 1, max_tokens=1)
    harness.finish()
    assert admissions(harness) == ([3, 0, 1, 2] if order == "fcfs" else [3, 2, 1, 0])
    assert [harness.clients[uid].num_cached for uid in (0, 1, 2)] == [0, 8, 20]


def test_longest_prefix_looks_at_a_bounded_window() -> None:
    """Catches: a scan of the whole queue, and a look-up in every step."""
    harness = loaded("longest-prefix")
    looked_up: list[int] = []
    cache = harness.scheduler.cache.prefix_cache
    match = cache.match

    def counted(tokens, salt=None):  # type: ignore[no-untyped-def]
        looked_up.append(int(tokens[0]))
        return match(tokens, salt)

    cache.match = counted  # type: ignore[method-assign]
    for uid in range(60):  # of which no two share a page
        start = [(2, 3, 4, 6)[uid % 4], uid // 4 % 8 + 2, uid // 32 + 2]
        harness.submit(uid, [*start, *[2] * 18], max_tokens=1)
    harness.submit(90, [5] * 21, max_tokens=1)
    harness.step()
    assert len(looked_up) <= PREFIX_WINDOW + 1
    assert 5 not in looked_up, "it is not among the first ones yet"
    before = len(looked_up)
    harness.step()
    harness.step()
    assert len(looked_up) <= before + 4, "one newcomer and one admission a step"
    harness.finish()
    assert admissions(harness).index(90) == 60 - PREFIX_WINDOW + 1, (
        "it goes first once it is looked at"
    )


@given(st.data(), st.sampled_from(["fcfs", "longest-prefix"]))
@settings(max_examples=scaled(40))  # an example is some hundred steps
def test_invariant_15_overtaking_is_bounded(data: st.DataObject, order: str) -> None:
    """However attractive the newcomers, and whatever fits, no request is overtaken for ever.

    Catches: skip-ahead or longest-prefix order without ageing.
    """
    prefix: dict[int, int] = {}
    queue = WaitingQueue(None if order == "fcfs" else lambda candidate: prefix[candidate.order])
    waiting: dict[int, RequestState] = {}
    overtaken: dict[int, int] = {}
    large = data.draw(st.sets(st.integers(0, 3)), label="large ones")
    fits_after = data.draw(st.integers(0, 100), label="step at which they fit")
    for step in range(SKIP_LIMIT * 4):
        for _ in range(2):
            newcomer = request(len(prefix))
            prefix[newcomer.order] = newcomer.order if step else 0  # always longer ones
            waiting[newcomer.order] = newcomer
            overtaken[newcomer.order] = 0
            queue.push(newcomer)
        while (candidate := queue.take()) is not None:
            if candidate.order in large and step < fits_after:
                if not queue.note_blocked(candidate):
                    break
                continue
            queue.note_admitted(candidate)
            del waiting[candidate.order]
            for other in waiting:
                if other < candidate.order:
                    overtaken[other] += 1
            break
        queue.put_back()
    assert max(overtaken.values()) <= SKIP_LIMIT
    assert not any(order < 4 for order in waiting), "the first ones have been served"


def test_an_aged_request_that_does_not_fit_holds_the_queue() -> None:
    queue = WaitingQueue(lambda candidate: candidate.order)
    aged = request(0)
    aged.skipped = SKIP_LIMIT
    for one in (aged, request(1), request(2)):
        queue.push(one)
    assert queue.take() is aged
    assert not queue.note_blocked(aged)
    queue.put_back()
    assert queue.take() is aged, "nobody is lost"


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 3)),
        min_size=2,
        max_size=8,
    ),
    st.integers(0, 20),
)
def test_retraction_takes_the_lowest_priority_then_the_newest_never_the_oldest(
    asks: list[tuple[int, int, int]], extra_pages: int
) -> None:
    """Whoever is retracted, everybody gets the same tokens; the victim is always the right one.

    Catches: a victim by age alone, the oldest as a victim, output lost with the row.
    """
    harness = Harness(page_size=1, num_pages=28 + extra_pages, max_seq_len=28, rows=4, budget=40)
    scheduler = harness.scheduler
    room = scheduler._room
    choose = room._retract_one
    seen = 0

    def checked() -> RequestState | None:
        nonlocal seen
        active = [one for one in room._active() if not one.retracting]
        victim = choose()
        if victim is None:
            assert len(active) < 2
            return None
        seen += 1
        others = sorted(active, key=lambda one: one.order)[1:]
        assert victim in others, "the oldest is never taken"
        assert victim.priority == min(one.priority for one in others)
        equals = [one.order for one in others if one.priority == victim.priority]
        assert victim.order == max(equals)
        return victim

    room._retract_one = checked  # type: ignore[method-assign]
    prompts = {}
    for uid, (priority, length, gap) in enumerate(asks):
        for _ in range(gap):
            harness.step()
        prompts[uid] = [uid % 4 + 2] * (length % 9 + 1)
        harness.submit(uid, prompts[uid], priority, max_tokens=18, min_tokens=18)
    harness.finish()
    for uid, prompt in prompts.items():
        assert harness.clients[uid].tokens == generate(prompt, 18, min_tokens=18)
    retracted = {stats.uid: stats.num_retractions for stats in harness.recorder.requests}
    assert retracted[0] == 0
    assert sum(retracted.values()) == seen == scheduler.num_retractions


def test_a_retracted_requests_prefix_stays_cached() -> None:
    harness = Harness(page_size=1, num_pages=40, max_seq_len=28, rows=4, budget=40)
    for uid in range(3):
        harness.submit(uid, [uid + 2] * 7, max_tokens=18, min_tokens=18)
    admitted_with: dict[int, int] = {}
    attach = harness.scheduler.cache.attach_prefix

    def noted(request: RequestState) -> int:
        cached = attach(request)
        if request.num_retractions:
            admitted_with.setdefault(request.uid, cached)
        return cached

    harness.scheduler.cache.attach_prefix = noted  # type: ignore[method-assign]
    harness.finish()
    assert admitted_with
    assert all(cached > 0 for cached in admitted_with.values())
    assert harness.clients[0].num_cached == 0, "its own cached tokens are not counted as shared"


def test_requests_that_ended_while_they_waited_do_not_pile_up() -> None:
    """Catches: prompts of clients that gave up, kept for as long as the queue's head is blocked."""
    harness = Harness(rows=1, num_pages=64, max_seq_len=48)
    harness.submit(0, [2, 3], 1, max_tokens=40, min_tokens=40)
    harness.step()
    for uid in range(1, 2000):
        harness.submit(uid, [uid % 8 + 2] * 30, max_tokens=4)
        harness.abort(uid)
    harness.submit(5000, [4, 4], max_tokens=3)
    harness.step()
    assert len(harness.scheduler._prefill._waiting._heap) < 100
    harness.finish()
    assert harness.clients[5000].tokens == generate([4, 4], 3)
