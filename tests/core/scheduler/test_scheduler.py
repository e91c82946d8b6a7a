"""The scheduler by example; its laws are in the ``test_invariants_*`` beside this file."""

from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.message import GenerateRequest, StreamStart
from minisgl.request import SamplingParams
from support.fake_engine import generate
from support.schedules import Ask, plain, play, schedules, set_ups, submit
from support.scheduling import Harness


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


EARLY = {"early": (0,), "twice": (0, 1), "late": (), "both": (1,)}
"""Which launches of four fail, by the kind of failure."""


@example(plain(overlap=True), 1, [Ask(0, (2, 3), 1)], [(0, "late")])
@given(
    set_ups(max_budget=6),  # prompts of several chunks
    st.sampled_from([1, 2, 4]),
    schedules(last_arrival=4),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(EARLY))), min_size=1, max_size=3),
)
def test_invariant_11_failed_steps_end_their_own_requests_and_spoil_nothing(
    set_up: dict[str, Any],
    page_size: int,
    schedule: list[Ask],
    failures: list[tuple[int, str]],
) -> None:
    """Launches fail, and results fail while the next step is in flight, up to two in a row.

    Catches: pages that a failed step should have written, cached because a later step of the same
    request was processed; a staging buffer that is written again while a failed plan is on its way.
    """
    early = {4 * n + place for n, kind in failures for place in EARLY[kind]}
    late = {4 * n for n, kind in failures if kind in {"late", "both"}} - early
    broken = True
    small = {"page_size": page_size, "num_pages": 120 // page_size, "cache": "radix"}
    harness = Harness(
        **{**set_up, **small},
        fail_at=lambda plan: broken and plan.number in early,
        fail_late_at=lambda plan: broken and plan.number in late,
    )
    play(harness, schedule)
    for uid, ask in enumerate(schedule):
        client = harness.clients[uid]
        if client.reasons == ["error"] and "injected" in client.failures[0]:
            assert client.tokens == ask.tokens[: len(client.tokens)]
        else:
            assert client.tokens == ask.tokens
            assert client.reasons == [ask.reason]
    broken = False
    for uid, ask in enumerate(schedule, start=100):
        submit(harness, uid, ask)
    harness.finish()
    for uid, ask in enumerate(schedule, start=100):
        assert harness.clients[uid].tokens == ask.tokens, "a failed step's pages were shared"


def test_the_prompts_end_goes_to_the_detokenizer_as_it_is() -> None:
    harness = Harness(page_size=4, num_pages=40)
    prompt = np.array([2, 3, 4], dtype="<i4").tobytes()
    params = SamplingParams(max_tokens=2)
    started: list[StreamStart] = []
    harness.transport.inbox.append(GenerateRequest(0, prompt, params, prompt_tail="<think>"))
    while harness.transport.inbox or harness.scheduler.has_work:
        harness.scheduler.receive(0)
        harness.scheduler.step()
        started += [start for batch in harness.transport.outbox for start in batch.started]
        harness.transport.outbox.clear()
    assert [start.prompt_tail for start in started] == ["<think>"]
