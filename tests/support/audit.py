"""Recounts a scheduler's pages from outside, and follows its plans as a rank would.

This is the one place of the tests that looks into the scheduler's tables.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl.engine.plan import BatchPlan
from minisgl.kvcache.interface import PrefixCache
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.scheduler import Scheduler
from support.scheduling import Harness


@dataclass(frozen=True, slots=True)
class Feed:
    """What one row computes in a step: ``tokens`` is ``None`` for its last sampled one."""

    row: int
    start: int
    length: int
    tokens: list[int] | None
    sampled: bool


class PlanFollower:
    """The page table and the lengths as a rank has them that applied every plan so far."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.pages = np.zeros((num_rows, width), dtype=np.int32)
        self._lengths = [0] * num_rows
        self._order: list[int] = []

    def apply(self, plan: BatchPlan) -> list[Feed]:
        """Apply a plan; returns what it feeds."""
        for row, column, page in plan.table_writes.tolist():
            self.pages[row, column] = page
        if plan.decode_rows is not None:
            self._order = plan.decode_rows.tolist()
        feeds = []
        for row in self._order[: plan.num_decode_rows]:
            feeds.append(Feed(row, self._lengths[row], 1, None, sampled=True))
            self._lengths[row] += 1
        first = 0
        for row, start, length, sampled in plan.chunks.tolist():
            tokens = plan.token_ids[first : first + length].tolist()
            feeds.append(Feed(row, start, length, tokens, sampled=bool(sampled)))
            self._lengths[row] = start + length
            first += length
        return feeds


def cached_pages(prefix_cache: PrefixCache) -> list[int]:
    """Return every page of a prefix cache, by a walk over its nodes; the naive one has none."""
    nodes = getattr(prefix_cache, "_nodes", list)()
    return [page for node in nodes for page in np.frombuffer(node.pages, dtype=np.int32).tolist()]


class Audit:
    """Looks on while a harness runs: at each plan when it is launched, at the books after a step.

    Subclasses say what must hold.
    """

    def attach(self, harness: Harness) -> None:
        """Follow ``harness`` from now on."""
        self.scheduler: Scheduler = harness.scheduler
        table = self.scheduler.table
        self.follower = PlanFollower(*table.pages.shape)
        launch, step = harness.engine.forward_batch, harness.step

        failures: list[AssertionError] = []

        def audited_launch(plan: BatchPlan) -> Any:
            try:
                self.launched(plan, self.follower.apply(plan))
            except AssertionError as failure:
                failures.append(failure)  # the scheduler takes it for a failed step
                raise
            return launch(plan)

        def audited_step() -> None:
            step()
            if failures:
                raise failures[0]
            self.stepped()

        harness.engine.forward_batch = audited_launch  # type: ignore[method-assign]
        harness.step = audited_step  # type: ignore[method-assign]

    def launched(self, plan: BatchPlan, feeds: list[Feed]) -> None:
        """Judge a plan that is being launched."""

    def stepped(self) -> None:
        """Judge the books after a step."""

    @property
    def owners(self) -> Iterator[RequestState]:
        """Requests that have a row."""
        return (request for request in self.scheduler.table.requests if request is not None)

    def free_pages(self) -> list[int]:
        """Return the free list."""
        pages: list[int] = self.scheduler.cache._free.pages().tolist()
        return pages

    def cached_pages(self) -> list[int]:
        """Return every page of the prefix cache."""
        return cached_pages(self.scheduler.cache.prefix_cache)

    def shared_pages_of(self, request: RequestState) -> list[int]:
        """Return the pages of a row that belong to the cache."""
        return self._columns(request, 0, request.num_shared_pages)

    def private_pages_of(self, request: RequestState) -> list[int]:
        """Return the pages of a row that belong to its request alone."""
        last = int(self.scheduler.table.num_pages[request.row])
        return self._columns(request, request.num_shared_pages, last)

    def committed_pages_of(self, request: RequestState) -> list[int]:
        """Return the pages of a row that hold its committed tokens."""
        committed = int(self.scheduler.table.committed[request.row])
        return self._columns(request, 0, self.scheduler.cache.pages_for(committed))

    def _columns(self, request: RequestState, first: int, last: int) -> list[int]:
        pages: list[int] = self.scheduler.table.pages[request.row, first:last].tolist()
        return pages
