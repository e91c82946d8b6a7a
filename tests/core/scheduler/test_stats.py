"""What observers are told about steps and requests."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.message import StopFound
from minisgl.scheduler import commit, scheduler, stats, token_times
from support.fake_engine import FakeResult
from support.scheduling import Harness


class Clock:
    """A clock that a test moves; everything that reads the time reads this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def drive(harness: Harness, clock: Clock, tick: float = 1.0) -> None:
    """Step until all is done; each step takes ``tick`` seconds."""
    while harness.scheduler.has_work or harness.transport.inbox:
        harness.step()
        clock.now += tick


def test_request_stats_tell_the_times_of_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    harness = Harness(rows=1, budget=4, overlap=False)
    harness.submit(0, [2] * 8, max_tokens=3, min_tokens=3)
    harness.submit(1, [3] * 4, max_tokens=1)
    drive(harness, clock)
    first, second = harness.recorder.requests
    # Two chunks at 100 and 101, the other tokens at 102 and 103.
    assert first.queue_time == 0
    assert first.prefill_time == first.time_to_first_token == 1
    assert first.inter_token_times == (1.0, 1.0)
    assert first.total_time == 3
    assert first.finish_reason in {"stop", "length"}
    assert second.queue_time == 4
    assert second.prefill_time == 0
    assert second.time_to_first_token == 4
    assert second.inter_token_times == ()
    assert (second.num_prompt_tokens, second.num_completion_tokens) == (4, 1)


def test_a_request_that_never_ran_has_no_times() -> None:
    harness = Harness()
    harness.submit(0, [2] * 400, max_tokens=1)
    harness.submit(1, [2] * 4, max_tokens=1)
    harness.abort(1)
    harness.finish()
    for one in harness.recorder.requests:
        assert one.queue_time is one.prefill_time is one.time_to_first_token is None
        assert one.inter_token_times == ()


@given(st.integers(0, 12), st.integers(0, 4), st.booleans())
def test_tokens_past_a_stop_string_are_in_no_statistics(
    cut: int, late_by: int, overlap: bool
) -> None:
    """Catches: gaps of speculative tokens, which a count that only grows cannot take back."""
    harness = Harness(rows=1, overlap=overlap)
    harness.submit(0, [4, 4], max_tokens=30, min_tokens=30)
    while len(harness.clients[0].tokens) < cut + late_by:
        harness.step()
    harness.transport.inbox.append(StopFound(0, cut))
    harness.finish()
    [one] = harness.recorder.requests
    assert one.finish_reason == "stop"
    assert one.num_completion_tokens == cut
    assert len(one.inter_token_times) == max(cut - 1, 0)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 18)), min_size=1, max_size=6),
    st.integers(0, 20),
    st.booleans(),
)
def test_inter_token_times_are_those_that_clients_see(
    asks: list[tuple[int, int]], extra_pages: int, overlap: bool
) -> None:
    """Under retractions too: the wait for a new row is a gap like any other.

    Catches: times that stay with the row when its owner goes, or go to its next owner.
    """
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        harness = Harness(
            num_pages=28 + extra_pages, max_seq_len=28, rows=4, budget=40, overlap=overlap
        )
        seen: dict[int, list[float]] = {uid: [] for uid in range(len(asks))}
        for uid, (length, max_tokens) in enumerate(asks):
            prompt = [uid % 8 + 2] * length
            harness.submit(uid, prompt, max_tokens=max_tokens, min_tokens=max_tokens)
        while harness.scheduler.has_work or harness.transport.inbox:
            harness.step()
            for uid, client in harness.clients.items():
                missing = len(client.tokens) - len(seen[uid])
                seen[uid].extend([clock.now] * missing)
            clock.now += 0.5
    for one in harness.recorder.requests:
        assert one.inter_token_times == tuple(np.diff(seen[one.uid]).tolist())
        assert len(one.inter_token_times) == one.num_completion_tokens - 1
        assert sum(one.inter_token_times) == pytest.approx(seen[one.uid][-1] - seen[one.uid][0])


def test_step_stats_count_rows_tokens_pages_and_waiting() -> None:
    harness = Harness(page_size=2, num_pages=40, rows=2, budget=100, overlap=False)
    harness.submit(0, [2, 3, 4, 5, 6], max_tokens=3, min_tokens=3)
    harness.submit(1, [7] * 4, max_tokens=3, min_tokens=3)
    harness.submit(2, [8] * 4, max_tokens=3, min_tokens=3)
    harness.step()
    harness.step()
    first, second = harness.recorder.steps
    assert (first.num_decode_rows, first.num_prefill_rows, first.num_prefill_tokens) == (0, 2, 9)
    assert first.num_tokens == 9
    assert (first.num_running, first.num_waiting) == (2, 1)
    assert first.num_used_pages == 5, "three and two"
    assert (second.num_decode_rows, second.num_prefill_rows, second.num_tokens) == (2, 0, 2)
    assert second.step == 1
    assert second.host_us > 0
    harness.finish()
    last = harness.recorder.steps[-1]
    assert (last.num_running, last.num_waiting) == (1, 0), "its last request still has its row"
    assert last.num_used_pages + last.num_free_pages + last.num_evictable_pages == 40


def test_hit_counts_are_those_of_the_requests() -> None:
    harness = Harness(page_size=2, num_pages=60, rows=2)
    for uid in range(4):
        harness.submit(uid, [2, 3, 4, 5] * 3, max_tokens=2, min_tokens=2)
        harness.finish()
    last = harness.recorder.steps[-1]
    assert last.num_queried_tokens == sum(
        one.num_prompt_tokens for one in harness.recorder.requests
    )
    assert last.num_cached_tokens == sum(one.num_cached_tokens for one in harness.recorder.requests)
    assert last.num_cached_tokens == 30


def test_hit_counts_leave_out_what_a_retracted_request_finds_of_its_own() -> None:
    harness = Harness(num_pages=30, max_seq_len=28, rows=4, budget=30)
    for uid in range(4):
        harness.submit(uid, [uid + 2] * 7, max_tokens=18, min_tokens=18)
    harness.finish()
    assert harness.scheduler.num_retractions > 0
    last = harness.recorder.steps[-1]
    assert (last.num_queried_tokens, last.num_cached_tokens) == (28, 0)


def test_nothing_is_built_when_nobody_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: statistics that cost time without a listener."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("built for nobody")

    monkeypatch.setattr(stats, "StepStats", never)
    monkeypatch.setattr(stats, "RequestStats", never)
    monkeypatch.setattr(token_times.TokenTimes, "record", never)
    monkeypatch.setattr(token_times.TokenTimes, "__init__", never)
    harness = Harness(observed=False)
    harness.submit(0, [2, 3], max_tokens=4, min_tokens=4)
    harness.finish()
    assert len(harness.clients[0].tokens) == 4
    assert commit.TokenTimes is token_times.TokenTimes


def test_host_time_is_neither_waiting_nor_the_work_of_another_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a step that had to drain the pipeline, and counts the wait for the one before it."""
    clock = [0.0]

    def now() -> float:
        clock[0] += 1e-6
        return clock[0]

    def tokens_after_a_while(result: FakeResult) -> np.ndarray:
        clock[0] += 1000
        return tokens(result)

    tokens = FakeResult.tokens
    monkeypatch.setattr(FakeResult, "tokens", tokens_after_a_while)
    monkeypatch.setattr(scheduler.time, "perf_counter", now)
    harness = Harness(page_size=1, num_pages=30, max_seq_len=28, rows=4, budget=8)
    for uid in range(4):
        harness.submit(uid, [uid + 2] * 7, max_tokens=18, min_tokens=18)
    harness.finish()
    assert harness.scheduler.num_retractions > 0
    assert all(0 < step.host_us < 1000 for step in harness.recorder.steps)
