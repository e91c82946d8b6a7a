"""The collector of reference cycles: out of the way of a loop, and back afterwards."""

import gc
import weakref

import pytest

from minisgl.message import BackendMessage, Shutdown
from minisgl.processes import collector_at_rest, no_full_collections, quiet_collector
from support.scheduling import Harness


def old_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_growing_memory_starts_no_full_collection() -> None:
    """Catches: a pause of every stream while the collector visits 100,000 tree nodes."""
    before = gc.get_threshold()
    kept: list[object] = []
    with collector_at_rest():
        began = old_collections()
        for _ in range(200_000):
            kept.append([kept])
        assert old_collections() == began
    assert gc.get_threshold() == before
    for _ in range(200_000):
        kept.append([kept])
    assert old_collections() > began, "without it the same growth starts some"


def test_blocks_within_blocks_and_side_by_side_leave_the_thresholds_as_they_were() -> None:
    before = gc.get_threshold()
    with no_full_collections():
        at_rest = gc.get_threshold()
        assert at_rest != before
        with no_full_collections():
            assert gc.get_threshold() == at_rest
        assert gc.get_threshold() == at_rest
    assert gc.get_threshold() == before
    first, second = no_full_collections(), no_full_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


class Cycle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


def test_an_idle_scheduler_frees_what_the_loop_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: memory of a plugin's reference cycles that never comes back."""
    harness = Harness()
    for uid in range(260):
        harness.submit(uid, [2, 3, 4], max_tokens=20, min_tokens=20)
    scheduler, transport = harness.scheduler, harness.transport
    receive, idle = transport.receive, 0

    def receive_then_shut_down(timeout: float | None) -> list[BackendMessage]:
        nonlocal idle
        idle += timeout != 0
        return [Shutdown(drain=False)] if idle == 2 else receive(0)

    monkeypatch.setattr(transport, "receive", receive_then_shut_down)
    with collector_at_rest():
        gone = weakref.ref(Cycle())
        assert gone() is not None
        scheduler.run()
        assert scheduler.num_processed_steps > 1000
        assert gone() is None


def test_what_exists_at_the_start_is_never_visited_again():
    gc.unfreeze()
    before, thresholds, young = gc.get_freeze_count(), gc.get_threshold(), [[]]
    quiet_collector()
    try:
        assert gc.get_freeze_count() > before + 1000
        assert not any(known is young for known in gc.get_objects())
        collections = gc.get_stats()[0]["collections"]
        step = [[] for _ in range(2000)]
        assert gc.get_stats()[0]["collections"] == collections, "a step sets no collection off"
        assert len(step) == 2000
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
