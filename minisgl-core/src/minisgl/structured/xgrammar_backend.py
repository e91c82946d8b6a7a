"""XGrammar behind the interface of grammar engines; needs ``minisgl-core[structured]``."""

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

import msgspec

from minisgl.errors import RequestError
from minisgl.request import GrammarSpec
from minisgl.structured.compiler import took_too_long
from minisgl.structured.interface import GrammarContext, MaskArray
from minisgl.structured.utf8 import Utf8Guard
from minisgl.structured.xgrammar_worker import Job, Outcome, WorkerArguments

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

START_TIMEOUT: Final = 120.0
"""Seconds in which the helper must be ready."""

_GRACE: Final = 0.5
"""Seconds beyond the limit of a compilation, in which the helper says that it is over."""

_STARTER: Final = (
    "import json, sys; job = json.loads(sys.argv[1]); sys.path[:] = job['path'];"
    " from minisgl.structured.xgrammar_worker import run_worker;"
    " run_worker(job['descriptor'], job['parent'])"
)


class XGrammarMatcher:
    """Follows one text."""

    finished = False
    """XGrammar always wants an end-of-sequence token, which ends the request."""

    def __init__(self, grammar: "xgrammar.CompiledGrammar", guard: Utf8Guard) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar)
        self._guard = guard
        self._pending: int | None = None

    def fill_mask(self, mask: MaskArray) -> None:
        """Write which tokens may come next."""
        self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))
        if self._pending is not None:
            self._guard.restrict(mask, self._pending)

    def accept(self, token_id: int) -> bool:
        """Take the next token of the text; returns whether it could come."""
        self._pending = self._guard.pending(token_id)
        return bool(self._matcher.accept_token(token_id))


class XGrammarGrammar:
    """A compiled grammar."""

    def __init__(self, grammar: "xgrammar.CompiledGrammar", guard: Utf8Guard) -> None:
        self._grammar = grammar
        self._guard = guard
        self.num_bytes = int(grammar.memory_size_bytes)

    def matcher(self) -> XGrammarMatcher:
        """Return a matcher at the beginning of a text."""
        return XGrammarMatcher(self._grammar, self._guard)


class XGrammarBackend:
    """Compiles in a helper process, and matches here.

    Args:
        context: what it is made for.
        max_whitespace: see ``XGrammarSettings``.

    Raises:
        RuntimeError: the helper does not get ready.
    """

    def __init__(self, context: GrammarContext, max_whitespace: int | None) -> None:
        self._timeout_s = context.compile_timeout_s
        self._arguments = WorkerArguments(context=context, max_whitespace=max_whitespace)
        self._lock = threading.Lock()
        self._closed = False
        self._helper = _Helper(self._arguments)
        # Takes seconds, as the helper does: both at once.
        from xgrammar import TokenizerInfo

        self._info = TokenizerInfo.deserialize_json(self._helper.wait_ready().decode())
        self._guard = Utf8Guard(self._info.decoded_vocab, context.vocab_size)
        self._finalizer = weakref.finalize(self, _Helper.stop, self._helper)

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        """Compile one grammar; see ``GrammarBackend.compile``."""
        outcome = self._ready_helper().run(spec, self._timeout_s + _GRACE)
        if outcome.status == "late":
            raise took_too_long(spec, self._timeout_s)
        if outcome.status == "failed":
            raise RuntimeError(outcome.message)
        if outcome.status != "done":
            what = outcome.message or "it is too complex: the compilation crashed"
            raise RequestError(f"grammar ({spec.kind}) is not accepted: {what}", param="grammar")
        from xgrammar import CompiledGrammar

        data = outcome.data.decode()
        return XGrammarGrammar(CompiledGrammar.deserialize_json(data, self._info), self._guard)

    def close(self) -> None:
        """Stop the helper. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._helper.stop()

    def _ready_helper(self) -> "_Helper":
        """Return the helper; a new one if it has ended."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the grammar engine is closed")
            if not self._helper.alive:
                logger.warning("the helper that compiles grammars has ended; another one starts")
                self._finalizer.detach()
                self._helper = _Helper(self._arguments)
                self._helper.wait_ready()
                self._finalizer = weakref.finalize(self, _Helper.stop, self._helper)
            return self._helper


class _Helper:
    """The helper process, and the jobs that it has not answered.

    Args:
        arguments: its first message.
    """

    def __init__(self, arguments: WorkerArguments) -> None:
        ours, theirs = socket.socketpair()
        job = {"path": sys.path, "descriptor": theirs.fileno(), "parent": os.getpid()}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter)
                [sys.executable, "-c", _STARTER, json.dumps(job)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self._end = Connection(ours.detach())
        self._lock = threading.Lock()
        self._jobs: dict[int, Future[Outcome]] = {}
        self._num_jobs = 0
        self.alive = True
        self._arguments = arguments

    def run(self, spec: GrammarSpec, timeout: float) -> Outcome:
        """Compile ``spec``; an answer that does not come ends the helper.

        Raises:
            RuntimeError: the helper has ended.
        """
        future: Future[Outcome] = Future()
        with self._lock:
            if not self.alive:
                raise RuntimeError("the helper that compiles grammars has ended")
            number = self._num_jobs
            self._num_jobs += 1
            self._jobs[number] = future
            self._end.send_bytes(msgspec.msgpack.encode(Job(number, spec)))
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            self.stop()
            return Outcome(number, "late")

    def stop(self) -> None:
        """End the process. Safe to call twice."""
        self.alive = False
        self._process.kill()
        self._process.wait()

    def wait_ready(self) -> bytes:
        """Return the vocabulary, as data.

        Raises:
            RuntimeError: the helper does not get ready.
        """
        try:
            self._end.send_bytes(pickle.dumps(self._arguments))
            if not self._end.poll(START_TIMEOUT):
                raise RuntimeError(f"its helper was not ready within {START_TIMEOUT:g} s")
            first = msgspec.msgpack.decode(self._end.recv_bytes(), type=Outcome)
        except (EOFError, OSError) as error:
            self.stop()
            raise RuntimeError("its helper ended at its start") from error
        except RuntimeError:
            self.stop()
            raise
        if first.status != "done":
            self.stop()
            raise RuntimeError(first.message)
        threading.Thread(target=self._read, name="grammar-replies", daemon=True).start()
        return first.data

    def _read(self) -> None:
        """Hand out answers until the helper ends; runs in a thread of its own."""
        try:
            while True:
                outcome = msgspec.msgpack.decode(self._end.recv_bytes(), type=Outcome)
                with self._lock:
                    future = self._jobs.pop(outcome.number)
                future.set_result(outcome)
        except (EOFError, OSError):
            with self._lock:
                self.alive = False
                jobs, self._jobs = self._jobs, {}
            for future in jobs.values():
                future.set_exception(RuntimeError("the helper that compiles grammars has ended"))
            self._end.close()
            self.stop()
