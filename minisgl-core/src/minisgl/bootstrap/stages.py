"""How long the parts of a start take: what a user who waits wants to know."""

import time


class Stages:
    """Notes when each part has ended; the first one begins now."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._parts: list[tuple[str, float]] = []

    def done(self, name: str) -> None:
        """Note that ``name``, which began when the part before it ended, has ended now."""
        now = time.perf_counter()
        self._parts.append((name, now - self._last))
        self._last = now

    def __str__(self) -> str:
        """Return seconds in all, and those of each part that took a tenth or more."""
        parts = [f"{name} {took:.1f}" for name, took in self._parts if took >= 0.1]
        took = f"{self._last - self._began:.1f} s"
        return f"{took} ({', '.join(parts)})" if parts else took
