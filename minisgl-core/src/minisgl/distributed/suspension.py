"""Notices that this process was suspended: Ctrl-Z, a debugger, a frozen container."""

import threading
import time
from collections.abc import Callable
from typing import Final

_PERIOD: Final = 0.25
"""Seconds between two looks at the clock."""

_LEAST: Final = 1.0
"""Seconds of silence that no busy machine explains."""


class SuspensionWatch:
    """A thread that looks at the clock all the time; where it missed some, the process was stopped.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = clock()
        self._last: tuple[float, float] | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch from now on."""
        self._seen = self._clock()
        threading.Thread(target=self._run, name="suspension-watch", daemon=True).start()

    def look(self) -> None:
        """Look at the clock once."""
        now = self._clock()
        missed = now - self._seen - _PERIOD
        if missed >= _LEAST:
            self._last = (now, missed)
        self._seen = now

    def recent(self, within: float, least: float) -> float:
        """Return the seconds of the last suspension, or 0.

        Args:
            within: seconds that may have passed since its end.
            least: a shorter one counts as none.
        """
        self.look()
        if self._last is None:
            return 0.0
        ended, seconds = self._last
        return seconds if seconds >= least and self._clock() - ended <= within else 0.0

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD):
            self.look()
