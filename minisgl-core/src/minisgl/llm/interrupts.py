"""Ctrl-C in a notebook or a script: it ends a call, and never strikes inside an engine step."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

IMPATIENT: Final = 3
"""The interrupt of this number strikes at once, in case the step hangs."""


@contextlib.contextmanager
def interrupts_at_the_end() -> Iterator[None]:
    """Hold ``KeyboardInterrupt`` back until the block is done.

    A step that is cut in its middle has advanced lengths and taken pages for a result that never
    comes. Does nothing outside the main thread, or where a program handles SIGINT itself.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    num_interrupts = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts >= IMPATIENT:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if num_interrupts:
        raise KeyboardInterrupt
