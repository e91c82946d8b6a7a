"""A scheduler process without an engine: it speaks the real messages and answers at once.

Each step gives one token to every running request. What it costs is next to nothing, so that a
benchmark measures what stands in front of the engine. When each token was emitted is kept, and
written down at the end: a request is known by its ``seed``.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from minisgl.message import (
    AbortRequest,
    GenerateRequest,
    Ping,
    Pong,
    Shutdown,
    StopFound,
    StreamStart,
    TokenBatch,
)
from minisgl.message.sockets import Addresses
from minisgl.message.status import StatusSender
from minisgl.processes import collector_at_rest
from minisgl.scheduler.transport import Transport
from minisgl.scheduler.zmq_transport import ZmqTransport
from minisgl.settings import Settings

MAX_SEQ_LEN: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class NullSpeed:
    """How it emits.

    Attributes:
        token_ids: that answers consist of, in turn.
        step_s: seconds from one step to the next; 0 takes none.
        log: file for the times at which tokens were emitted.
    """

    token_ids: tuple[int, ...]
    step_s: float
    log: Path


def null_scheduler_main(
    settings: Settings,  # noqa: ARG001
    addresses: Addresses,
    status: StatusSender,
    *,
    speed: NullSpeed,
) -> None:
    """Run in place of the scheduler process until ``Shutdown``."""
    status.starting("doing nothing")
    transport = ZmqTransport(addresses)
    scheduler = NullScheduler(transport, speed)
    with collector_at_rest():
        status.ready({"max_seq_len": MAX_SEQ_LEN})
        scheduler.run()
    scheduler.write_log()
    transport.close()


class NullScheduler:
    """One token for each running request and step, every answer as long as it may be.

    Args:
        transport: its ends of the wire.
        speed: how it emits.
    """

    def __init__(self, transport: Transport, speed: NullSpeed) -> None:
        self._transport = transport
        self._speed = speed
        self._token_ids = np.asarray(speed.token_ids, dtype="<i4")
        self._uids: npt.NDArray[np.int64] = np.empty(0, dtype="<i8")
        self._left: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._new: list[GenerateRequest] = []
        self._aborted: list[int] = []
        self._step_times: list[float] = []
        self._first_step: dict[int, int] = {}

    def run(self) -> None:
        """Serve until ``Shutdown``."""
        due = time.perf_counter()
        while self._receive():
            if self._speed.step_s:
                due = max(due + self._speed.step_s, time.perf_counter())
                while (left := due - time.perf_counter()) > 0:
                    time.sleep(left)
            self.step()

    def step(self) -> None:
        """Emit one token for each running request."""
        started = self._admit()
        if not len(self._uids) and not self._aborted:
            return
        number = len(self._step_times)
        self._left -= 1
        ended = self._left == 0
        finished: list[int] = self._uids[ended].tolist()
        token_ids = self._token_ids[(number + np.arange(len(self._uids))) % len(self._token_ids)]
        reasons = ["length"] * len(finished) + ["abort"] * len(self._aborted)
        finished += self._aborted
        batch = TokenBatch(
            started,
            self._uids.tobytes(),
            token_ids.astype("<i4").tobytes(),
            finished,
            reasons,
            [0] * len(finished),
            [None] * len(finished),
        )
        self._uids, self._left, self._aborted = self._uids[~ended], self._left[~ended], []
        self._step_times.append(time.perf_counter())
        self._transport.send(batch)

    def write_log(self) -> None:
        """Write the time of each step, and each request's seed and first step."""
        seeds = np.asarray(list(self._first_step), dtype=np.int64)
        steps = np.asarray(list(self._first_step.values()), dtype=np.int64)
        np.savez(self._speed.log, times=self._step_times, seeds=seeds, steps=steps)

    def _receive(self) -> bool:
        is_busy = bool(len(self._uids) or self._new or self._aborted)
        for message in self._transport.receive(0 if is_busy else None):
            match message:
                case GenerateRequest():
                    self._new.append(message)
                case AbortRequest(uids=uids):
                    self._end(uids)
                case StopFound(uid=uid):
                    self._end([uid])
                case Ping(sequence=sequence):
                    number, running = len(self._step_times), len(self._uids)
                    self._transport.pong(Pong(sequence, number, running, 0, 1, 1))
                case Shutdown():
                    return False
        return True

    def _end(self, uids: list[int]) -> None:
        self._new = [one for one in self._new if one.uid not in uids]
        gone = np.isin(self._uids, uids)
        self._aborted += self._uids[gone].tolist()
        self._uids, self._left = self._uids[~gone], self._left[~gone]

    def _admit(self) -> list[StreamStart]:
        new, self._new = self._new, []
        if not new:
            return []
        number = len(self._step_times)
        self._first_step.update((one.params.seed, number) for one in new if one.params.seed)
        self._uids = np.append(self._uids, np.asarray([one.uid for one in new], dtype="<i8"))
        self._left = np.append(self._left, [one.params.max_tokens or 16 for one in new])
        return [StreamStart(one.uid, len(one.prompt), one.params) for one in new]
