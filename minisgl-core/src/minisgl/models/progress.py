"""Progress bars on standard error, which a full disk behind it does not end."""

import contextlib
import sys
import threading
from typing import Any

from tqdm import tqdm


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar with a lock of its own: tqdm's is a semaphore of the whole machine.

    That one would stay if this process is killed.
    """


_Bar.set_lock(threading.RLock())


class _Tolerant:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write ``text`` if there is room for it."""
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush if there is room."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def progress_bar(*args: Any, show: bool, **options: Any) -> "tqdm[Any]":
    """Return a progress bar with the arguments of ``tqdm``, silent unless ``show``."""
    return _Bar(*args, disable=not show, file=_Tolerant(sys.stderr), **options)
