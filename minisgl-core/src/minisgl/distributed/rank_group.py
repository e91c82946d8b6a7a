"""The parent side: starts ranks 1 to N-1, sends them plans, notices what becomes of them."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from minisgl.distributed.channel import Channel
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.progress import ProgressBoard, RankProgress
from minisgl.distributed.rank_process import STOP, RankArguments
from minisgl.distributed.suspension import SuspensionWatch
from minisgl.errors import EngineLostError
from minisgl.message import Codec
from minisgl.message.status import Failed, Status
from minisgl.processes import describe_crash, describe_end, signals_blocked

logger = logging.getLogger(__name__)

_STOP_TIMEOUT: Final = 2.0
"""Seconds that ranks get to end after the last plan."""

_GRACE: Final = 1.0
"""Seconds to wait for the cause of a failure, once its effect is here."""

_STARTER: Final = (
    "import json, sys; job = json.loads(sys.argv[1]); sys.path[:] = job['path'];"
    " from importlib import import_module;"
    " from minisgl.distributed.rank_process import RankArguments, run_rank;"
    " run_rank(RankArguments(**job['rank']), getattr(import_module(job['module']), job['name']))"
)


class _Rank:
    """One child process and what it last said about itself."""

    def __init__(
        self,
        number: int,
        process: "subprocess.Popen[bytes]",
        channel: Channel,
        progress: RankProgress,
    ) -> None:
        self.number = number
        self.process = process
        self.channel = channel
        self.progress = progress
        self.num_statuses = 0
        self.failure: Failed | None = None
        self._codec: Codec[Status] = Codec(Status)
        self._beats = -1
        self._beat_seen = 0.0

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.process.pid})"

    def read(self) -> None:
        """Take in what the rank says."""
        try:
            while (frame := self.channel.receive(0)) is not None:
                status = self._codec.decode(bytes(frame))
                self.num_statuses += 1
                if isinstance(status, Failed):
                    self.failure = status
        except OSError:
            return  # it has ended; how, its process tells

    def cause(self) -> EngineLostError | None:
        """Return why the rank is lost, unless it runs, or ended because another one did."""
        # Its end is looked at first: whatever it said, it said before.
        code = self.process.poll()
        self.read()
        failure = self.failure
        if failure is not None:
            if failure.exit_code == EngineLostError.exit_code:
                return None
            return EngineLostError(f"{self} failed: {failure.message}", failure.exit_code)
        if code is None:
            return None
        return EngineLostError(f"{self} {describe_end(code)}")

    def silent_for(self, now: float) -> float:
        """Return seconds since the first look at the rank's last sign of life."""
        if self.progress.beats != self._beats:
            self._beats, self._beat_seen = self.progress.beats, now
        return now - self._beat_seen

    def forget_beats(self) -> None:
        """Measure silence anew."""
        self._beats = -1


@dataclass(slots=True, weakref_slot=True)
class _Resources:
    """What must be given back, even if nobody closes the group.

    Attributes:
        owner: pid of rank 0.
        life: the end of a pipe that the other ranks watch; ``None`` once it is closed.
        ranks: the other ones.
        communicator: of rank 0, once they are connected.
        store: the directory where they meet, until then.
        serving: the ranks wait for plans, so they can be asked to stop.
        lost: a rank has failed, and its end has been explained.
        watch: notices that rank 0 was stopped.
    """

    owner: int
    life: int | None
    ranks: list[_Rank] = field(default_factory=list)
    communicator: GlooCommunicator | None = None
    store: Path | None = None
    serving: bool = False
    lost: bool = False
    watch: SuspensionWatch = field(default_factory=SuspensionWatch)

    def close_descriptors(self) -> None:
        """Close what the other ranks see the end of; safe to call twice."""
        for rank in self.ranks:
            rank.channel.close()
        if self.life is not None:
            os.close(self.life)
            self.life = None


class RankGroup:
    """Ranks 1 to N-1 of an engine, each a process of its own, and rank 0's link to them.

    The order of calls: constructor, ``begin``, ``connect``, ``serve``, then ``send`` for each plan.
    ``close``, the end of the object and the end of the interpreter stop the processes.

    Args:
        size: number of ranks, this one included.
        module, name: the function that each of the others runs, given its ``RankLink``.
        timeout: seconds that a rank may be behind the others.
        start_timeout: the same until ``serve``.
    """

    def __init__(
        self, size: int, module: str, name: str, *, timeout: float, start_timeout: float
    ) -> None:
        self.size = size
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._limit = f"{start_timeout:g} s (parallel.start_timeout)"
        self._looked = time.monotonic()
        sentinel, life = os.pipe()
        self._resources = _Resources(owner=os.getpid(), life=life)
        self._finalizer = weakref.finalize(self, _stop, self._resources)
        # A fork that lives on would keep the other ranks from seeing the end of this process.
        os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self._resources)))
        self._resources.watch.start()
        try:
            with ProgressBoard.new_file(size) as board:
                self.board = ProgressBoard(board, size)
                for rank in range(1, size):
                    self._start(rank, f"{module}:{name}", board.fileno(), sentinel)
        finally:
            os.close(sentinel)

    def begin(self, job: bytes) -> None:
        """Give every rank its job; it runs ``name`` and gets this from ``receive_job``.

        Raises:
            EngineLostError: a rank has ended.
        """
        self._send(job, "the start")

    def connect(self) -> GlooCommunicator:
        """Wait until every rank is there, and connect all of them.

        Raises:
            EngineLostError: a rank has failed (with its exit code), or does not come in time.
        """
        self._wait_for_statuses(1)
        # In a directory of mode 0700, and gone before anything else happens.
        store = self._resources.store = Path(tempfile.mkdtemp(prefix="minisgl-"))
        self._send(str(store / "ranks").encode(), "the start")
        try:
            communicator = self._resources.communicator = GlooCommunicator(
                str(store / "ranks"),
                0,
                self.size,
                timeout=self._start_timeout,
                progress=self.board.ranks[0],
            )
            communicator.barrier()
        except EngineLostError as error:
            raise self.explain(error, "the start") from error
        shutil.rmtree(store, ignore_errors=True)
        return communicator

    def serve(self) -> None:
        """From now on the short timeout holds."""
        self._limit = f"{self._timeout:g} s (parallel.timeout)"
        self._resources.serving = True
        assert self._resources.communicator is not None, "ranks connect before they serve"
        self._resources.communicator.set_timeout(self._timeout)

    def send(self, plan: memoryview) -> None:
        """Send a packed plan to every other rank.

        Raises:
            EngineLostError: a rank has ended, or reads no more.
        """
        self._send(plan, f"step {self.board.ranks[0].begun}")

    def check_alive(self) -> None:
        """Look whether every rank runs and shows signs of life; costs microseconds.

        Raises:
            EngineLostError: names the rank that does not, and what became of it.
        """
        now = time.monotonic()
        # Silence counts only while somebody listens: this process may have been stopped itself.
        if now - self._looked > self._timeout / 2:
            self._forget_beats()
        self._looked = now
        for rank in self._resources.ranks:
            if (cause := rank.cause()) is not None:
                raise self._lost(cause)
            if rank.process.poll() is not None:
                raise self.explain(None, f"step {self.board.ranks[0].begun}")
            if rank.silent_for(now) > self._timeout:
                raise self._lost(
                    EngineLostError(f"{rank} has shown no sign of life for {self._limit}")
                )

    def explain(self, error: Exception | None, what: str) -> EngineLostError:
        """Return what to tell people: the first cause of a failure, not its echoes.

        Args:
            error: what rank 0 has seen of it.
            what: rank 0 was doing.
        """
        if error is not None and not isinstance(error, (EngineLostError, OSError)):
            return self._lost(EngineLostError(f"rank 0 failed in {what}: {describe_crash(error)}"))
        if isinstance(error, EngineLostError) and self._resources.lost:
            return error  # it has been explained
        if os.getpid() != self._resources.owner:
            return self._lost(
                EngineLostError(
                    f"process {os.getpid()} is a fork of the one whose engine this is; "
                    "a fork needs an engine of its own"
                )
            )
        deadline = time.monotonic() + _GRACE
        beats = [rank.progress.beats for rank in self._resources.ranks]
        while time.monotonic() < deadline:
            for rank in self._resources.ranks:
                if (cause := rank.cause()) is not None:
                    return self._lost(cause)
            time.sleep(0.01)
        lost = self._suspect(what, beats, error)
        limit = self._timeout if self._resources.serving else self._start_timeout
        if seconds := self._resources.watch.recent(max(limit, 3 * _GRACE), limit / 2):
            lost = EngineLostError(f"this process was suspended for {seconds:.0f} s; {lost}")
        return self._lost(lost)

    def name(self, rank: int) -> str:
        """Return how messages call one of the other ranks."""
        return str(self._resources.ranks[rank - 1])

    def close(self) -> None:
        """Stop the other ranks and wait for their end. Safe to call twice."""
        self._finalizer()

    def _start(self, rank: int, target: str, board: int, sentinel: int) -> None:
        channel, there = Channel.pair(self._timeout)
        arguments = RankArguments(
            rank=rank,
            size=self.size,
            channel=there.fileno(),
            board=board,
            sentinel=sentinel,
            parent_pid=os.getpid(),
            by_kernel=threading.current_thread() is threading.main_thread(),
            timeout=self._timeout,
            start_timeout=self._start_timeout,
        )
        module, _, name = target.partition(":")
        # Imports ignore all other entries, and so must a rank.
        path = [entry for entry in sys.path if isinstance(entry, str)]
        job = {"path": path, "module": module, "name": name, "rank": asdict(arguments)}
        # A fresh interpreter without multiprocessing, which would run the caller's script again.
        with there, signals_blocked():
            process = subprocess.Popen(  # noqa: S603  (our own code, no shell)
                # -P: not from the working directory, of which this process may import nothing.
                [sys.executable, "-P", "-c", _STARTER, json.dumps(job)],
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(), board, sentinel),
            )
        started = _Rank(rank, process, channel, self.board.ranks[rank])
        self._resources.ranks.append(started)

    def _send(self, frame: bytes | memoryview, what: str) -> None:
        for rank in self._resources.ranks:
            try:
                rank.channel.send(frame)
            except OSError as error:
                raise self.explain(error, what) from error

    def _wait_for_statuses(self, count: int) -> None:
        """Wait until every rank has said ``count`` things and none of them that it failed."""
        deadline = time.monotonic() + self._start_timeout
        waiting = list(self._resources.ranks)
        while waiting:
            for rank in self._resources.ranks:
                if (cause := rank.cause()) is not None:
                    raise self._lost(cause)
            waiting = [rank for rank in waiting if rank.num_statuses < count]
            if time.monotonic() > deadline:
                raise self._lost(
                    EngineLostError(f"{waiting[0]} has not started within {self._limit}")
                )
            if waiting:
                time.sleep(0.01)

    def _suspect(self, what: str, beats: list[int], error: Exception | None) -> EngineLostError:
        """Return whom to name when no rank has ended for a reason of its own."""
        ranks = self._resources.ranks
        most = max(progress.num_collectives for progress in self.board.ranks)
        late = [rank for rank in ranks if rank.progress.num_collectives < most]
        # One that was stopped within a collective has begun as many as those who wait for it.
        silent = [
            rank
            for rank, before in zip(ranks, beats, strict=True)
            if rank.progress.beats == before and rank.process.poll() is None
        ]
        if suspects := late or silent:
            begun = suspects[0].progress.begun >= self.board.ranks[0].begun
            verb = "got no further in" if begun else "not begun"
            return EngineLostError(f"{suspects[0]} has {verb} {what} for {self._limit}")
        for rank in ranks:
            if rank.failure is not None:
                return EngineLostError(f"{rank.failure.message} in {what}")
        return EngineLostError(f"the ranks lost each other in {what}: {error}")

    def _lost(self, error: EngineLostError) -> EngineLostError:
        self._resources.lost = True
        return error

    def _forget_beats(self) -> None:
        for rank in self._resources.ranks:
            rank.forget_beats()


def _stop(resources: _Resources) -> None:
    """End the ranks: those that wait for plans in good order, others at once."""
    if os.getpid() != resources.owner:
        return  # a fork of the process that they belong to
    resources.watch.stop()
    for rank in resources.ranks:
        if resources.serving and not resources.lost:
            _say_stop(rank)
        else:
            rank.process.kill()
    deadline = time.monotonic() + _STOP_TIMEOUT
    for rank in resources.ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("%s did not stop when asked; killing it", rank)
            rank.process.kill()
            rank.process.wait()
    resources.close_descriptors()
    if resources.communicator is not None:
        resources.communicator.close()
    if resources.store is not None:
        shutil.rmtree(resources.store, ignore_errors=True)


def _leave(resources: weakref.ref[_Resources]) -> None:
    """Let go, in a fork of rank 0, of what the other ranks take for its life."""
    if (still := resources()) is not None:
        still.close_descriptors()


def _say_stop(rank: _Rank) -> None:
    try:
        rank.channel.send(STOP)
    except OSError:
        rank.process.kill()
