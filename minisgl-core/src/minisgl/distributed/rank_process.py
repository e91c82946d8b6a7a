"""The child side of a rank group: how ranks 1 to N-1 begin, talk to rank 0 and end."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Never

from minisgl.distributed.channel import Channel
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.progress import ProgressBoard, RankProgress
from minisgl.errors import EngineLostError, MinisglError
from minisgl.message import Codec
from minisgl.message.status import Failed, Starting, Status
from minisgl.processes import (
    EXIT_CRASHED,
    describe_crash,
    die_with_parent,
    leave_signals_to_parent,
)

logger = logging.getLogger(__name__)

BEAT: Final = 0.25
"""Seconds between a rank's signs of life."""

STOP: Final = b""
"""The frame after the last plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArguments:
    """What a rank gets on its command line; descriptors are inherited from rank 0.

    Attributes:
        rank, size: of this process, and of the group.
        channel: descriptor of its end of the channel to rank 0.
        board: descriptor of the progress board.
        sentinel: descriptor of a pipe that ends with rank 0.
        parent_pid: rank 0.
        by_kernel: rank 0 started us from its main thread, so the kernel may watch that.
        timeout: seconds for one collective, once everybody serves.
        start_timeout: the same until then.
    """

    rank: int
    size: int
    channel: int
    board: int
    sentinel: int
    parent_pid: int
    by_kernel: bool
    timeout: float
    start_timeout: float


class RankLink:
    """A rank's link to rank 0: its job, its place in the process group, then plans.

    Every method raises ``ConnectionError`` when rank 0 has ended.
    """

    def __init__(self, arguments: RankArguments) -> None:
        self.rank = arguments.rank
        self.progress = ProgressBoard(arguments.board, arguments.size).ranks[arguments.rank]
        self._arguments = arguments
        end = socket.socket(fileno=arguments.channel)
        self._channel = Channel(end, arguments.start_timeout)
        self._codec: Codec[Status] = Codec(Status)
        self._communicator: GlooCommunicator | None = None

    def receive_job(self) -> bytearray:
        """Wait for what ``RankGroup.begin`` sends."""
        job = self._channel.receive(None)
        if not job:
            raise ConnectionAbortedError("rank 0 gave up before it had a job for this rank")
        return job

    def connect(self) -> GlooCommunicator:
        """Join the process group, when rank 0 says where it meets.

        Raises:
            EngineLostError: the others did not come.
        """
        self._send(Starting("connecting the ranks"))
        store = (self._channel.receive(None) or b"").decode()
        self._communicator = GlooCommunicator(
            store,
            self.rank,
            self._arguments.size,
            timeout=self._arguments.start_timeout,
            progress=self.progress,
        )
        self._communicator.barrier()
        return self._communicator

    def plans(self) -> Iterator[bytearray]:
        """Yield each frame of ``RankGroup.send``, until rank 0 says that it was the last one."""
        assert self._communicator is not None, "ranks connect before they serve"
        self._communicator.set_timeout(self._arguments.timeout)
        while True:
            frame = self._channel.receive(None)
            if not frame:
                return
            yield frame

    def failed(self, exit_code: int, message: str) -> None:
        """Tell rank 0 why this rank ends."""
        try:
            self._send(Failed(exit_code, message))
        except OSError:
            return  # it is gone itself

    def _send(self, status: Status) -> None:
        self._channel.send(self._codec.encode(status))


def run_rank(arguments: RankArguments, serve: Callable[[RankLink], None]) -> Never:
    """Do ``serve`` in this fresh process, then end it.

    An error is told to rank 0 first, and ends the others through it.
    """
    die_with_parent(arguments.parent_pid, arguments.sentinel, by_kernel=arguments.by_kernel)
    leave_signals_to_parent()
    link = RankLink(arguments)
    # A thread, so that a step that takes its time does not look like a process that is stopped.
    threading.Thread(target=_beat, args=(link.progress,), name="beat", daemon=True).start()
    code = _run(link, serve)
    logging.shutdown()
    # The interpreter's own end unloads torch, which takes a second, and rank 0 waits for it.
    os._exit(code)


def _beat(progress: RankProgress) -> Never:
    while True:
        progress.beat()
        time.sleep(BEAT)


def _run(link: RankLink, serve: Callable[[RankLink], None]) -> int:
    """Return the exit code."""
    try:
        serve(link)
    except (ConnectionError, EngineLostError) as error:
        # Others have ended, and whoever was first tells why: this is but an echo.
        logger.debug("the rank ends", exc_info=True)
        link.failed(EngineLostError.exit_code, str(error))
        return EngineLostError.exit_code
    except MinisglError as error:
        logger.debug("the rank ends", exc_info=True)
        link.failed(error.exit_code, str(error))
        return error.exit_code
    except Exception as error:
        logger.exception("rank %d crashed", link.rank)
        link.failed(EXIT_CRASHED, describe_crash(error))
        return EXIT_CRASHED
    return 0
