"""Starts the worker processes, follows their start-up, notices deaths and silence, stops them."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from minisgl.errors import WorkerDiedError
from minisgl.message import Codec, DecodeError
from minisgl.message.sockets import Addresses
from minisgl.message.status import Alive, Failed, Ready, Starting, Status
from minisgl.processes import describe_end, signals_blocked
from minisgl.server.journal import ask_for_stacks, last_lines
from minisgl.server.worker_process import WorkerJob, WorkerTarget, run_worker
from minisgl.settings import Settings

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 5.0
"""Seconds that a worker gets to finish its work after it was asked to stop."""

EXIT_TIMEOUT = 10.0
"""Seconds that all workers then get to exit: torch takes its time to unload on a busy CPU."""


LOOK_INTERVAL = 1.0
"""Seconds between two looks at who has shown a sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """Seconds that a worker may go without a sign of life; then it counts as dead.

    Attributes:
        serving: once it is ready.
        starting: before that: an import from a slow disk holds up all threads of a process.
    """

    serving: float = 15.0
    starting: float = 300.0


class StartFailedError(WorkerDiedError):
    """A worker ended before it was ready.

    Args:
        message: the cause in one line.
        exit_code: what the server ends with.
        is_silent: the worker has not said itself why.
    """

    def __init__(self, message: str, exit_code: int, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_silent = is_silent


@dataclass(slots=True)
class Worker:
    """One child process and what it last said about itself.

    It is ``finished`` once it has done all its work, and ``exited`` once the process is gone.
    ``looks`` counts the pool's looks since its last sign of life.
    """

    name: str
    process: BaseProcess
    connection: "Connection[bytes, bytes] | Connection"
    ready: asyncio.Future[dict[str, Any]]
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    stage: str = "starting"
    failure: Failed | None = None
    looks: int = 0
    num_dropped: int = 0

    def describe_end(self) -> str:
        """Return how the process ended, for people."""
        return describe_end(self.process.exitcode)


class WorkerPool:
    """The child processes of one server; lives in the server's event loop.

    Args:
        settings: sent to every worker.
        addresses: of the sockets between them.
        on_death: called, with a line for people, when a worker ends that nobody stopped, or
            shows no sign of life.
        limits: how long it may show none.
    """

    def __init__(
        self,
        settings: Settings,
        addresses: Addresses,
        on_death: Callable[[str], None],
        limits: SilenceLimits,
    ) -> None:
        self._settings = settings
        self._addresses = addresses
        self._on_death = on_death
        self._limits = limits
        self._context = multiprocessing.get_context("spawn")
        self._codec: Codec[Status] = Codec(Status)
        self.workers: dict[str, Worker] = {}
        self._stopping = False
        self._lost: Worker | None = None

    def start(self, name: str, target: WorkerTarget, addresses: Addresses | None = None) -> None:
        """Start one process; returns before it is ready.

        Args:
            name: of the process, in messages.
            target: what it runs.
            addresses: that it gets, if they are not those of all.
        """
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=run_worker,
            name=f"minisgl-{name}",
            args=(
                WorkerJob(
                    target, name, self._settings, addresses or self._addresses, there, os.getpid()
                ),
            ),
        )
        # The tracker that spawning wants must run by now: starting it lifts the block.
        resource_tracker.ensure_running()
        with signals_blocked():
            process.start()
        there.close()
        loop = asyncio.get_running_loop()
        worker = Worker(name, process, here, loop.create_future())
        self.workers[name] = worker
        loop.add_reader(here.fileno(), self._read_status, worker)
        loop.add_reader(process.sentinel, self._note_exit, worker)

    async def wait_ready(self) -> dict[str, dict[str, Any]]:
        """Return what each worker said when it was ready.

        Raises:
            StartFailedError: one of them ended first; the message is its cause in one line.
        """
        infos = await asyncio.gather(*(worker.ready for worker in self.workers.values()))
        return dict(zip(self.workers, infos, strict=True))

    async def watch(self) -> None:
        """Report the first worker that is stopped or frozen; returns then, or when all stop.

        Silence is counted in looks, not read from a clock: while this process is suspended itself
        (with its whole group, or with the machine) nobody looks, and no time passes.
        """
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            if self._stopping:
                return
            for worker in self.workers.values():
                if self._is_silent(worker):
                    return

    def num_dropped(self) -> dict[str, int]:
        """Return by process how many messages were none."""
        return {name: worker.num_dropped for name, worker in self.workers.items()}

    def report_hang(self, name: str, what: str) -> None:
        """Report a worker that shows signs of life and gets nothing done.

        Args:
            name: of the worker.
            what: it does not do; ends the sentence "the NAME process (pid N) ...".
        """
        if not self._stopping and not self.workers[name].exited.is_set():
            self._report(self.workers[name], what)

    def last_words(self) -> list[str]:
        """Return what the worker that was reported last logged; of one that hangs, its stacks too.

        Takes up to a second.
        """
        worker = self._lost
        if worker is None or worker.process.pid is None:
            return []
        journal = self._addresses.journal(worker.name)
        if not worker.exited.is_set():
            ask_for_stacks(worker.process.pid, journal)
        return last_lines(journal)

    def begin_stop(self) -> None:
        """From now on workers end because they were told to: deaths are no news."""
        self._stopping = True

    async def wait_finished(self, name: str) -> None:
        """Wait until a worker that was asked to stop has done all its work, or time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.workers[name].finished.wait(), STOP_TIMEOUT)

    async def wait_exited(self) -> bool:
        """Wait until all processes are gone; kill those that stay, and say if none had to be."""
        exits = [asyncio.ensure_future(w.exited.wait()) for w in self.workers.values()]
        _, late = await asyncio.wait(exits, timeout=EXIT_TIMEOUT)
        for task in late:
            task.cancel()
        left = [worker for worker in self.workers.values() if not worker.exited.is_set()]
        for worker in left:
            logger.warning("the %s process did not stop when asked; killing it", worker.name)
        await self._kill(left)
        return not left

    async def kill_all(self) -> None:
        """End every worker that still runs, at once."""
        self.begin_stop()
        await self._kill(list(self.workers.values()))
        for worker in self.workers.values():
            if not worker.ready.cancel() and not worker.ready.cancelled():
                worker.ready.exception()  # a second failed start is no news: mark it as seen

    async def _kill(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if not worker.exited.is_set():
                worker.process.kill()
        for worker in workers:
            await worker.exited.wait()

    def _read_status(self, worker: Worker) -> None:
        """Take what one worker says; the pipe ends with its process."""
        try:
            while worker.connection.poll():
                worker.looks = 0
                self._apply(worker, self._codec.decode(worker.connection.recv_bytes()))
        except (EOFError, OSError):
            self._close_pipe(worker)
        except DecodeError:
            logger.warning("the %s process sent a status that is none", worker.name)

    def _apply(self, worker: Worker, status: Status) -> None:
        match status:
            case Starting(stage=stage):
                worker.stage = stage
                logger.debug("%s: %s", worker.name, stage)
            case Ready(info=info):
                worker.stage = "serving"
                if not worker.ready.done():
                    worker.ready.set_result(info)
            case Alive(num_dropped=num_dropped):
                worker.num_dropped = num_dropped
            case Failed():
                worker.failure = status

    def _is_silent(self, worker: Worker) -> bool:
        """Look at one worker; report it if it has been silent for too long."""
        if worker.exited.is_set():
            return False
        is_serving = worker.ready.done()
        limit = self._limits.serving if is_serving else self._limits.starting
        worker.looks += 1
        # The first look may follow the sign of life at once: it ends no interval.
        if (worker.looks - 1) * LOOK_INTERVAL < limit:
            return False
        while_starting = "" if is_serving else f" while {worker.stage}"
        self._report(worker, f"has shown no sign of life for {limit:g} s{while_starting}")
        return True

    def _report(self, worker: Worker, what: str) -> None:
        self._lost = self._lost or worker
        cause = f": {worker.failure.message}" if worker.failure else ""
        self._on_death(f"the {worker.name} process (pid {worker.process.pid}) {what}{cause}")

    def _close_pipe(self, worker: Worker) -> None:
        if not worker.connection.closed:
            asyncio.get_running_loop().remove_reader(worker.connection.fileno())
            worker.connection.close()
        worker.finished.set()

    def _note_exit(self, worker: Worker) -> None:
        """A process has ended: fail its start, or report its death."""
        asyncio.get_running_loop().remove_reader(worker.process.sentinel)
        if not worker.connection.closed:
            self._read_status(worker)
        self._close_pipe(worker)
        worker.process.join()
        worker.exited.set()
        logger.debug("the %s process %s", worker.name, worker.describe_end())
        if self._stopping:
            return
        self._lost = self._lost or worker
        if worker.ready.done():
            self._report(worker, worker.describe_end())
        elif worker.failure is not None:
            failure = worker.failure
            worker.ready.set_exception(StartFailedError(failure.message, failure.exit_code))
        else:
            worker.ready.set_exception(
                StartFailedError(
                    f"the {worker.name} process {worker.describe_end()} while {worker.stage}",
                    WorkerDiedError.exit_code,
                    is_silent=True,
                )
            )
