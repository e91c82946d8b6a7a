"""What a worker last logged, kept in small files that outlive it, and where its threads stood.

A process that dies cannot say why, and one that hangs does not. Its supervisor reads here what it
said before, and asks a hung one for the stacks of all its threads. The files lie in the server's
private directory and go with it.
"""

import faulthandler
import logging
import os
import signal
import time
from collections import deque
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

STACKS_SIGNAL: Final = signal.SIGUSR2
"""Makes a worker write the stacks of its threads into its journal."""

_MAX_BYTES: Final = 32 * 1024
_MAX_LINES: Final = 20
_MAX_STACK_LINES: Final = 100
_STACKS_WAIT_S: Final = 1.0


class _QuietHandler(RotatingFileHandler):
    """Gives up silently when the disk is full: standard error still has the line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's own name)
        """Drop the line."""


def keep_journal(path: Path, formatter: logging.Formatter | None) -> None:
    """Write this process's log lines to ``path`` too, and its stacks when it crashes or is asked.

    Args:
        path: of the journal; its directory exists.
        formatter: of the lines.
    """
    handler = _QuietHandler(path, maxBytes=_MAX_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)
    stacks = os.open(_stacks(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, stacks)


def last_lines(path: Path) -> list[str]:
    """Return what a process last logged, and the stacks that it has written; oldest first."""
    lines: deque[str] = deque(maxlen=_MAX_LINES)
    for part in (path.with_name(f"{path.name}.1"), path):
        lines.extend(_read(part).splitlines())
    return [*lines, *_read(_stacks(path)).splitlines()[:_MAX_STACK_LINES]]


def ask_for_stacks(pid: int, path: Path) -> None:
    """Let a process that hangs write where its threads are; waits up to a second for it.

    Args:
        pid: of a process that keeps a journal.
        path: of that journal.
    """
    before = len(_read(_stacks(path)))
    try:
        os.kill(pid, STACKS_SIGNAL)
    except ProcessLookupError:
        return
    until = time.monotonic() + _STACKS_WAIT_S
    while len(_read(_stacks(path))) == before and time.monotonic() < until:
        time.sleep(0.05)


def _stacks(path: Path) -> Path:
    return path.with_suffix(".stacks")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
