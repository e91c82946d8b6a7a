"""Follows the scheduler: does it answer, and does it get on?"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Final

from minisgl.message import Ping, Pong

PING_INTERVAL: Final = 1.0
HEARTBEAT_TIMEOUT: Final = 30.0
"""Seconds without a heartbeat after which the server calls itself unhealthy: a step of a large
prompt may take some on a CPU."""


class Heartbeat:
    """Pings the scheduler and reads its answers.

    Args:
        send: sends a ping; must not block.
    """

    def __init__(self, send: Callable[[Ping], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._last_pong: float | None = None
        self._num_steps = -1
        self._idle_pings: int | None = None
        self.last: Pong | None = None

    async def ping(self) -> None:
        """Ask for a heartbeat every second until cancelled."""
        while True:
            self._send(Ping(next(self._numbers)))
            await asyncio.sleep(PING_INTERVAL)
            if self._idle_pings is not None:
                self._idle_pings += 1

    def take(self, pong: Pong) -> None:
        """Take note of an answer."""
        self._last_pong = time.monotonic()
        self.last = pong
        idle = not pong.num_running and not pong.num_waiting
        if self._idle_pings is not None and (idle or pong.num_steps != self._num_steps):
            self._idle_pings = 0
        self._num_steps = pong.num_steps

    def watch_steps(self) -> None:
        """From now on the scheduler is expected to get on: it is ready."""
        self._idle_pings = 0

    @property
    def stalled_s(self) -> float:
        """Seconds since the scheduler last told of a finished step, or of nothing to do.

        Counted in pings: while this process is suspended itself, no time passes. 0 before
        ``watch_steps``.
        """
        return (self._idle_pings or 0) * PING_INTERVAL

    def load(self) -> dict[str, int]:
        """Return what the last answer said: requests, pages, steps."""
        beat = self.last
        if beat is None:
            return {}
        return {
            "num_running": beat.num_running,
            "num_waiting": beat.num_waiting,
            "num_free_pages": beat.num_free_pages,
            "num_pages": beat.num_pages,
            "num_steps": beat.num_steps,
        }

    def why_unhealthy(self) -> str | None:
        """Return why the scheduler does not look alive, or ``None`` if it does."""
        if self._last_pong is None:
            return "the scheduler has not answered yet"
        age = time.monotonic() - self._last_pong
        if age > HEARTBEAT_TIMEOUT:
            return f"the scheduler has not answered for {age:.0f} s"
        return None
