"""How a child process begins and ends: shared by the server's workers and the engine's ranks.

A child never outlives its parent: the kernel kills it with its parent (Linux), and a thread that
waits for the parent's end does so elsewhere. It ignores SIGINT, SIGTERM and SIGHUP, because a
terminal or a service manager sends them to the whole group, while the parent stops its children in
order.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Final

HANDLED_SIGNALS: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
"""What children leave to their parent: a terminal sends SIGHUP when it is closed."""

EXIT_CRASHED: Final = 1

_PR_SET_PDEATHSIG: Final = 1

_RESTING_THRESHOLDS: Final = (10_000, 1_000, 1_000)
"""When the collector looks at its generations of objects: the oldest one in effect never."""


_QUIET_THRESHOLDS: Final = (5_000, 2, 5)
"""New objects that set off a collection, and how many of these set off one of older objects.

Requests end in cycles. Where 20,000 objects and every tenth collection decided, an API server with
256 streams grew from 112 to 139 MiB over 50,000 requests; so from 97 to 99, at the same cost.
"""


def die_with_parent(parent_pid: int, sentinel: int | None, *, by_kernel: bool = True) -> None:
    """Arrange that this process ends when its parent does, however that happens.

    Args:
        parent_pid: who started this process; if it is gone already, this process ends now.
        sentinel: a descriptor that becomes readable when the parent ends.
        by_kernel: let Linux send SIGKILL, which strikes a stopped process too. To the kernel the
            parent is the *thread* that started the child, so that one must live to the end.
    """
    if by_kernel and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(EXIT_CRASHED)
    if sentinel is not None:
        threading.Thread(
            target=_exit_after, args=(sentinel,), name="parent-watch", daemon=True
        ).start()


def leave_signals_to_parent() -> None:
    """Ignore what the parent acts on, and lift the block under which it started this process."""
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Start children in here: a Ctrl-C in their first moments would end them with a traceback.

    They inherit the block and lift it in ``leave_signals_to_parent``, once they ignore the signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_file_limit() -> None:
    """Allow as many connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems call their limit infinite, and refuse it.
    with contextlib.suppress(OSError, ValueError):
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def quiet_collector() -> None:
    """Make the collector of reference cycles cheap for a process that passes messages on.

    What exists now (imports, tokenizers, routes) is never visited again: full collections cost what
    requests have made since, not the tenths of a second that a loaded process takes. And one step's
    messages, which die young without any cycle, do not set the collector off.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_QUIET_THRESHOLDS)


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keep the collector of reference cycles from stopping a loop that must not wait.

    A full collection visits every object of the process: the server's took 100 to 200 ms with
    1024 requests, in the middle of a step. What exists already is never visited again, young
    objects are as ever, and a full collection is left to whoever knows when nobody waits.
    """
    gc.collect()
    gc.freeze()
    try:
        with no_full_collections():
            yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """Leave old objects to the collections that come afterwards, for a while.

    In a user's own process: what is there stays as it is. Of two such blocks in two threads the one
    that began first decides.
    """
    before = gc.get_threshold()
    if before == _RESTING_THRESHOLDS:
        yield
        return
    gc.set_threshold(*_RESTING_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def describe_end(exit_code: int | None) -> str:
    """Return how a process ended, for people: ``was killed by SIGKILL``.

    Args:
        exit_code: negative for a signal, as ``subprocess`` and ``multiprocessing`` have it.
    """
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-exit_code).name}"
        return f"was killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"


def describe_crash(error: BaseException) -> str:
    """Return an unexpected error in one line: its type and the first line of its message."""
    message = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {message}"


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(EXIT_CRASHED)
