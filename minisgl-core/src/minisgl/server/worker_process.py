"""The child side of the supervisor: how every worker process begins and ends."""

import logging
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from minisgl.errors import MinisglError
from minisgl.message.sockets import Addresses
from minisgl.message.status import StatusSender
from minisgl.processes import (
    EXIT_CRASHED,
    describe_crash,
    die_with_parent,
    leave_signals_to_parent,
)
from minisgl.server.journal import keep_journal
from minisgl.settings import Settings, configure_logging

logger = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between a worker's signs of life."""

WorkerTarget = Callable[[Settings, Addresses, StatusSender], None]
"""A module-level function that reports ``ready``, serves, and returns after ``Shutdown``."""


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
    parent = multiprocessing.parent_process()
    die_with_parent(job.parent_pid, None if parent is None else parent.sentinel)
    leave_signals_to_parent()
    lines = configure_logging(job.settings.log.level, job.name)
    keep_journal(job.addresses.journal(job.name), lines)
    status = StatusSender(job.connection)
    # A thread, so that a step that takes its time does not look like a process that is stopped.
    threading.Thread(target=_beat, args=(status,), name="beat", daemon=True).start()
    code = _run_target(job, status)
    # Tells the supervisor that the work is done: the interpreter's own end may take a second.
    status.close()
    sys.exit(code)


def _beat(status: StatusSender) -> None:
    while status.alive():
        time.sleep(BEAT)


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
        status.failed(EXIT_CRASHED, describe_crash(error))
        return EXIT_CRASHED
    return 0
