"""Aborts that overtook their request."""

import time

_MEMORY_S = 60.0
"""An abort for an unknown request is remembered for so long: with several tokenizer workers it
may arrive before the request itself."""


class EarlyAborts:
    """Remembers the ids of aborts whose request has not come yet."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}

    def add(self, uid: int) -> None:
        """Remember ``uid``, and forget what is too old."""
        now = time.monotonic()
        self._times.pop(uid, None)
        self._times[uid] = now
        # In order of time: the old ones are at the front.
        while now - self._times[first := next(iter(self._times))] > _MEMORY_S:
            del self._times[first]

    def take(self, uid: int) -> bool:
        """Return whether ``uid`` is remembered, and forget it."""
        return self._times.pop(uid, None) is not None
