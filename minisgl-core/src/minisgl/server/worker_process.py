"""The child side of the supervisor: how every worker process begins and ends.

A worker never outlives the server: the kernel kills it with its parent (Linux), and a thread that
watches the parent's pipe does so elsewhere. It ignores SIGINT and SIGTERM, because a terminal or
a service manager sends them to the whole group, while the supervisor stops workers in order.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Final

from minisgl.errors import MinisglError
from minisgl.message.sockets import Addresses
from minisgl.message.status import StatusSender
from minisgl.settings import Settings, configure_logging

logger = logging.getLogger(__name__)

WorkerTarget = Callable[[Settings, Addresses, StatusSender], None]
"""A module-level function that reports ``ready``, serves, and returns after ``Shutdown``."""

PR_SET_PDEATHSIG: Final = 1
EXIT_CRASHED: Final = 1


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a worker process is given at its start.

    Attributes:
        target: what it runs.
        name: of the process, in log lines and messages.
        settings, addresses: for ``target``.
        connection: its end of the pipe to the supervisor.
        parent_pid: the supervisor.
    """

    target: WorkerTarget
    name: str
    settings: Settings
    addresses: Addresses
    connection: "Connection[bytes, bytes] | Connection"
    parent_pid: int


def run_worker(job: WorkerJob) -> None:
    """Do ``job`` in this fresh process, then end it with an exit code of errors.py."""
    _die_with_parent(job.parent_pid)
    _leave_signals_to_parent()
    configure_logging(job.settings.log.level, job.name)
    status = StatusSender(job.connection)
    code = _run_target(job, status)
    # Tells the supervisor that the work is done: the interpreter's own end may take a second.
    job.connection.close()
    sys.exit(code)


def _run_target(job: WorkerJob, status: StatusSender) -> int:
    """Return the exit code; a failure is reported to the supervisor first."""
    try:
        job.target(job.settings, job.addresses, status)
    except MinisglError as error:
        status.failed(error.exit_code, str(error))
        logger.debug("the worker ends", exc_info=True)
        return error.exit_code
    except Exception as error:
        logger.exception("the %s process crashed", job.name)
        status.failed(EXIT_CRASHED, f"{type(error).__name__}: {_first_line(error)}")
        return EXIT_CRASHED
    return 0


def _die_with_parent(parent_pid: int) -> None:
    """Arrange that this process ends when its parent does, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(EXIT_CRASHED)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(
            target=_exit_after, args=(parent.sentinel,), name="parent-watch", daemon=True
        ).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(EXIT_CRASHED)


def _leave_signals_to_parent() -> None:
    """Ignore what the supervisor acts on, and lift the block under which it started us."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
