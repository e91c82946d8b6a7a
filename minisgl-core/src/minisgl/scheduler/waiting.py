"""The waiting queue: who is considered next for admission."""

import heapq
from collections.abc import Callable
from typing import Final, Literal

from minisgl.scheduler.request_state import RequestState

OrderName = Literal["fcfs", "longest-prefix"]

WINDOW: Final = 8
"""Waiting requests that one step looks at: it never scans the whole queue."""

PREFIX_WINDOW: Final = 32
"""The same for longest prefix, whose choice is the better the more there are to choose from."""

SKIP_LIMIT: Final = 64
"""So many later requests of its priority may be admitted before one that waits, and no more."""


_MAX_DEAD: Final = 64
"""So many requests that ended may lie in the queue anyway: it is not worth a look at all."""


class WaitingQueue:
    """Requests without a row, by priority, then age.

    One pass of admission takes candidates with ``take`` and reports what became of each with
    ``note_admitted`` or ``note_blocked``; ``put_back`` ends it. A pass looks at the first
    ``WINDOW`` or ``PREFIX_WINDOW`` requests only. First come first served takes them in order.
    Longest prefix takes, of those with the highest priority, the one of which the cache holds
    most, unless one has been overtaken ``SKIP_LIMIT`` times: that one goes first.

    Args:
        cached_tokens: how much of a request's prompt the prefix cache holds, for longest prefix;
            ``None`` for first come first served.
    """

    def __init__(self, cached_tokens: Callable[[RequestState], int] | None = None) -> None:
        self._cached_tokens = cached_tokens
        self._limit = WINDOW if cached_tokens is None else PREFIX_WINDOW
        self._heap: list[tuple[tuple[int, int], RequestState]] = []
        self._window: list[RequestState] = []
        self._blocked: list[RequestState] = []

    def push(self, request: RequestState) -> None:
        """Let ``request`` wait at the place of its priority and age."""
        heapq.heappush(self._heap, (request.admission_key, request))

    def note_ended(self, num_waiting: int) -> None:
        """A request has ended while it waited; ``num_waiting`` others still do.

        It is dropped when its turn comes, or with all others of its kind once they are the most.
        """
        if len(self._heap) > 2 * num_waiting + _MAX_DEAD:
            self._heap = [entry for entry in self._heap if entry[1].terminal is None]
            heapq.heapify(self._heap)

    def take(self) -> RequestState | None:
        """Take the next candidate of this pass out; ``None`` if there is none.

        There is none either once one that does not fit has been overtaken often enough, be it
        in this very pass.
        """
        if any(request.skipped >= SKIP_LIMIT for request in self._blocked):
            return None
        room = self._limit - len(self._blocked)
        size = room if self._cached_tokens is not None else min(room, 1)
        while len(self._window) < size and self._heap:
            request = heapq.heappop(self._heap)[1]
            if request.terminal is None:
                self._window.append(request)
        if not self._window:
            return None
        best = self._window[0]
        if self._cached_tokens is not None:
            best = min(self._window, key=self._rank)
        self._window.remove(best)
        return best

    def note_admitted(self, request: RequestState) -> None:
        """``request`` got a row: whoever was before it has been overtaken."""
        for other in (*self._blocked, *self._window):
            if other.admission_key < request.admission_key:
                other.skipped += 1

    def note_blocked(self, request: RequestState) -> bool:
        """``request`` does not fit; returns whether others may be tried before it."""
        self._blocked.append(request)
        return len(self._blocked) < self._limit and request.skipped < SKIP_LIMIT

    def put_back(self) -> None:
        """End the pass: all candidates that were not admitted wait again."""
        for request in (*self._blocked, *self._window):
            self.push(request)
        self._blocked.clear()
        self._window.clear()

    def _rank(self, request: RequestState) -> tuple[int, bool, int, int]:
        assert self._cached_tokens is not None
        if request.skipped >= SKIP_LIMIT:
            return (-request.priority, False, 0, request.order)
        return (-request.priority, True, -self._cached_tokens(request), request.order)
