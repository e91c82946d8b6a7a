"""A scheduler process without a model: it answers every prompt with the prompt, over and over.

Speaks the real messages through the real transport, so that everything around it can be tested
without torch. ``backend_options.fake`` steers it: ``delay`` (seconds a step), ``log`` (file that
gets a line for each event), ``fail`` (how to fail at start: ``load``, ``crash`` or ``exit``),
``startup`` (seconds until ready), ``deaf`` (ignore ``Shutdown``), ``first_step`` (seconds that the
first step with a request takes, in Python if ``computing``, else asleep), ``gate`` (a file: before
it exists no answer gets more than its first token).
"""

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.errors import ModelLoadError
from minisgl.message import (
    AbortRequest,
    Failure,
    GenerateRequest,
    Ping,
    Pong,
    PromptLogprobs,
    Shutdown,
    StopFound,
    StreamStart,
    TokenBatch,
)
from minisgl.message.sockets import Addresses
from minisgl.message.status import StatusSender
from minisgl.scheduler.transport import Transport
from minisgl.scheduler.zmq_transport import ZmqTransport
from minisgl.settings import Settings
from support.made_up_logprobs import made_up

MAX_SEQ_LEN = 4096
VOCAB_SIZE = 300
EOS_IDS = (0, 2)
NUM_PAGES = 64


def fake_scheduler_main(settings: Settings, addresses: Addresses, status: StatusSender) -> None:
    """Run in place of the scheduler process."""
    options = settings.backend_options.get("fake", {})
    status.starting("loading the model")
    time.sleep(float(options.get("startup", 0)))
    if options.get("fail") == "load":
        raise ModelLoadError("the file model.safetensors is cut off at byte 17")
    if options.get("fail") == "crash":
        raise ZeroDivisionError("first line\nsecond line")
    if options.get("fail") == "exit":
        os._exit(9)
    transport = ZmqTransport(addresses)
    status.num_dropped = lambda: transport.num_dropped
    logging.getLogger(__name__).info("the fake scheduler serves")
    status.ready({"max_seq_len": MAX_SEQ_LEN})
    EchoScheduler(transport, options).run()
    transport.close()


@dataclass
class _Running:
    request: GenerateRequest
    num_tokens: int = 0


class EchoScheduler:
    """One token of its own prompt for each running request and step."""

    def __init__(self, transport: Transport, options: dict[str, Any]) -> None:
        self._transport = transport
        self._delay = float(options.get("delay", 0))
        self._deaf = bool(options.get("deaf", False))
        self._first_step = float(options.get("first_step", 0))
        self._computes = bool(options.get("computing", False))
        self.gate = Path(options["gate"]) if "gate" in options else None
        self._log = Path(options["log"]) if "log" in options else None
        self._running: dict[int, _Running] = {}
        self._num_steps = 0
        self._pending = _Batch()

    def run(self) -> None:
        """Serve until ``Shutdown``."""
        while self.turn():
            if self._delay:
                time.sleep(self._delay)

    def turn(self) -> bool:
        """Receive, and run one step; return whether to go on."""
        goes_on = self._receive()
        self._step()
        return goes_on

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def _receive(self) -> bool:
        busy = bool(self._running) or not self._pending.is_empty
        for message in self._transport.receive(0 if busy else None):
            match message:
                case GenerateRequest():
                    self._note(f"generate {message.uid} {len(message.prompt)}")
                    self._accept(message)
                case AbortRequest(uids=uids):
                    self._note(f"abort {uids}")
                    for uid in uids:
                        self._end(uid, "abort")
                case StopFound(uid=uid, num_tokens=count):
                    self._note(f"stop_found {uid} {count}")
                    self._end(uid, "stop")
                case Ping(sequence=sequence):
                    num_free = NUM_PAGES - len(self._running)
                    self._transport.pong(
                        Pong(sequence, self._num_steps, len(self._running), 0, num_free, NUM_PAGES)
                    )
                case Shutdown():
                    self._note("shutdown")
                    if not self._deaf:
                        return False
        return True

    def _accept(self, request: GenerateRequest) -> None:
        prompt = request.prompt
        if len(prompt) + (request.params.max_tokens or 0) > MAX_SEQ_LEN:
            self._pending.fail(
                request.uid,
                f"{len(prompt)} prompt tokens exceed the context of {MAX_SEQ_LEN}",
                "prompt",
            )
        elif int(prompt.max()) >= VOCAB_SIZE:
            self._pending.fail(request.uid, f"token {prompt.max()} is not in the vocabulary", None)
        else:
            self._running[request.uid] = _Running(request)

    def _end(self, uid: int, reason: str) -> None:
        if self._running.pop(uid, None) is not None:
            self._pending.finish(uid, reason)

    def _step(self) -> None:
        batch, self._pending = self._pending, _Batch()
        if self._running:
            self._be_busy()
        for uid, running in list(self._running.items()):
            request = running.request
            prompt, params = request.prompt, request.params
            if self.gate and running.num_tokens and not self.gate.exists():
                continue
            if running.num_tokens == 0:
                batch.start(request)
            token = int(prompt[running.num_tokens % len(prompt)])
            running.num_tokens += 1
            batch.add(uid, token, params.logprobs)
            is_eos = token in EOS_IDS and not params.ignore_eos
            if is_eos or token in params.stop_token_ids:
                batch.finish(uid, "stop", len(prompt) // 2)
            elif running.num_tokens == (params.max_tokens or 200):
                batch.finish(uid, "length", len(prompt) // 2)
        for uid in batch.finished:
            self._running.pop(uid, None)
        if not batch.is_empty:
            self._num_steps += 1
            self._transport.send(batch.message())

    def _be_busy(self) -> None:
        until, self._first_step = time.monotonic() + self._first_step, 0.0
        while (left := until - time.monotonic()) > 0:
            if not self._computes:
                time.sleep(left)

    def _note(self, line: str) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{line}\n")


class _Batch:
    def __init__(self) -> None:
        self.started: list[StreamStart] = []
        self.uids: list[int] = []
        self.tokens: list[int] = []
        self.finished: list[int] = []
        self._reasons: list[str] = []
        self._cached: list[int] = []
        self._failures: list[Failure | None] = []
        self._places: list[int] = []
        self._num_top: list[int] = []
        self._prompt_logprobs: list[PromptLogprobs] = []

    def start(self, request: GenerateRequest) -> None:
        prompt, params = request.prompt, request.params
        wants_prompt = params.return_prompt or params.prompt_logprobs is not None
        self.started.append(
            StreamStart(
                request.uid,
                len(prompt),
                params,
                len(prompt) // 2,
                prompt_token_ids=request.token_ids if wants_prompt else b"",
                prompt_tail=request.prompt_tail,
            )
        )
        if params.prompt_logprobs is not None:
            tokens = prompt[1:].tolist()
            num_top = [params.prompt_logprobs] * len(tokens)
            logprobs = made_up(range(len(tokens)), tokens, num_top)
            self._prompt_logprobs.append(PromptLogprobs(request.uid, logprobs))

    def add(self, uid: int, token: int, logprobs: int | None) -> None:
        if logprobs is not None:
            self._places.append(len(self.tokens))
            self._num_top.append(logprobs)
        self.uids.append(uid)
        self.tokens.append(token)

    @property
    def is_empty(self) -> bool:
        return not self.uids and not self.finished

    def finish(self, uid: int, reason: str, num_cached: int = 0) -> None:
        self.finished.append(uid)
        self._reasons.append(reason)
        self._cached.append(num_cached)
        self._failures.append(None)

    def fail(self, uid: int, message: str, param: str | None) -> None:
        self.finish(uid, "error")
        self._failures[-1] = Failure(message, 400, param)

    def message(self) -> TokenBatch:
        return TokenBatch(
            self.started,
            np.asarray(self.uids, dtype="<i8").tobytes(),
            np.asarray(self.tokens, dtype="<i4").tobytes(),
            self.finished,
            self._reasons,
            self._cached,
            self._failures,
            made_up(self._places, [self.tokens[place] for place in self._places], self._num_top)
            if self._places
            else None,
            self._prompt_logprobs,
        )
