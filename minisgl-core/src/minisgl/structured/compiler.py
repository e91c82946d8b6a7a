"""Compiles grammars beside the scheduler's thread: deduplicated, cached, each within a time limit.

A compilation that hangs cannot be stopped from outside: its thread is given up, its requests get
an error, and another thread takes its place, a few times. Engines that can, stop by themselves.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from minisgl.errors import RequestError, without_messages
from minisgl.request import GrammarSpec
from minisgl.structured.interface import CompiledGrammar, GrammarBackend
from minisgl.structured.reasoning import Vocabulary

logger = logging.getLogger(__name__)
logger.addFilter(without_messages)

NUM_THREADS: Final = 2
"""Compilations at once."""

MAX_CACHED: Final = 256
MAX_CACHED_BYTES: Final = 512 * 2**20
"""Compiled grammars that are kept; the least recently used go first."""

MAX_LOST_THREADS: Final = 8
"""So many compilations may hang for ever; after that, new grammars are refused."""

_GRACE_S: Final = 1.0
"""Seconds that an engine gets beyond the limit, to stop by itself and say so."""


class Compilation:
    """One grammar on its way; shared by all requests that wait for it.

    Attributes:
        spec: what is compiled.
        grammar: the result, once ``done``.
        error: or why there is none.
        num_waiting: requests that wait for it.
        wants_vocabulary: whether these wait for the compiler's ``vocabulary``, too.
    """

    __slots__ = ("began", "done", "error", "grammar", "num_waiting", "spec", "wants_vocabulary")

    def __init__(self, spec: GrammarSpec, *, wants_vocabulary: bool = False) -> None:
        self.spec = spec
        self.wants_vocabulary = wants_vocabulary
        self.grammar: CompiledGrammar | None = None
        self.error: RequestError | None = None
        self.done = False
        self.began: float | None = None
        self.num_waiting = 0


class GrammarCompiler:
    """The scheduler's door to a grammar engine. All methods are for one thread, and none blocks.

    Args:
        create: makes the engine; called beside the scheduler's thread, with the first grammar.
        timeout_s: seconds that one compilation may take.
        off: why there is no engine, if there is none; then ``create`` is not called.
        load_vocabulary: makes ``vocabulary``; called beside the scheduler's thread, too.

    Attributes:
        vocabulary: the model's tokens, once a request has wanted them.
    """

    def __init__(
        self,
        create: Callable[[], GrammarBackend] | None,
        timeout_s: float = 10.0,
        *,
        off: str = "",
        load_vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        self._create = create
        self._timeout_s = timeout_s
        self._off = off
        self._load_vocabulary = load_vocabulary
        self.vocabulary: Vocabulary | None = None
        self._backend: GrammarBackend | None = None
        self._creating = threading.Lock()
        self._changed = threading.Condition()
        self._queue: deque[Compilation] = deque()
        self._running: list[Compilation] = []
        self._num_lost = 0
        self._current: dict[tuple[GrammarSpec, bool], Compilation] = {}
        self._cached: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._closed = False

    def submit(self, spec: GrammarSpec, *, wants_vocabulary: bool = False) -> Compilation:
        """Return the compilation of ``spec``: done if it is cached, else shared or new.

        Args:
            spec: what to compile.
            wants_vocabulary: it is done when ``vocabulary`` is there, too.

        Raises:
            RequestError: there is no grammar engine.
        """
        if self._create is None:
            raise RequestError(f"grammar cannot be obeyed: {self._off}", param="grammar")
        with self._changed:
            wants_vocabulary = wants_vocabulary and self.vocabulary is None
            cached = self._cached.get(spec)
            if cached is not None and not wants_vocabulary:
                self._cached.move_to_end(spec)
                found = Compilation(spec)
                found.grammar, found.done = cached, True
                return found
            compilation = self._current.get((spec, wants_vocabulary))
            if compilation is None:
                if self._num_lost >= MAX_LOST_THREADS:
                    raise RequestError(
                        f"grammar cannot be compiled: {self._num_lost} compilations hang, so no "
                        "more are begun; restart the server",
                        param="grammar",
                        status=503,
                    )
                compilation = Compilation(spec, wants_vocabulary=wants_vocabulary)
                self._current[spec, wants_vocabulary] = compilation
                self._queue.append(compilation)
                self._start_thread()
            compilation.num_waiting += 1
            return compilation

    def leave(self, compilation: Compilation) -> None:
        """One request waits no more; what nobody waits for is not begun."""
        with self._changed:
            compilation.num_waiting -= 1
            if not compilation.num_waiting and compilation in self._queue:
                self._queue.remove(compilation)
                del self._current[compilation.spec, compilation.wants_vocabulary]

    def poll(self) -> None:
        """Give up compilations that take too long; to be called while any request waits."""
        now = time.monotonic()
        with self._changed:
            for compilation in list(self._running):
                began = compilation.began
                if began is not None and now - began > self._timeout_s + _GRACE_S:
                    self._num_lost += 1
                    logger.error(
                        "the compilation of a %s hangs; its thread is given up",
                        compilation.spec.kind,
                    )
                    self._end(compilation, None, took_too_long(compilation.spec, self._timeout_s))
                    self._start_thread()

    def wait(self, timeout: float) -> None:
        """Sleep until something is compiled, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait(timeout)

    def close(self) -> None:
        """Stop the engine. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _start_thread(self) -> None:
        """Start one more thread if there is work for it; the lock is held."""
        if self._queue and len(self._running) < NUM_THREADS and not self._closed:
            compilation = self._queue.popleft()
            self._running.append(compilation)
            threading.Thread(
                target=self._work, args=(compilation,), name="grammar", daemon=True
            ).start()

    def _work(self, compilation: Compilation) -> None:
        """Compile one grammar, then the next ones; ends when there are none."""
        following: Compilation | None = compilation
        while following is not None:
            following = self._compile(following)

    def _compile(self, compilation: Compilation) -> Compilation | None:
        """Compile one grammar; returns the next one for this thread."""
        grammar, error = None, None
        try:
            backend = self._ready_backend()
            if compilation.wants_vocabulary:
                self._ready_vocabulary()
            compilation.began = time.monotonic()
            grammar = backend.compile(compilation.spec)
        except RequestError as refused:
            error = refused
        except Exception as failed:
            logger.error("the grammar engine failed", exc_info=failed)
            error = RequestError(
                f"the grammar engine failed: {failed}", param="grammar", status=500
            )
        with self._changed:
            if compilation not in self._running:  # given up meanwhile, and replaced
                self._num_lost -= 1
                return None
            self._end(compilation, grammar, error)
            if not self._queue or self._closed:
                return None
            following = self._queue.popleft()
            self._running.append(following)
            return following

    def _ready_backend(self) -> GrammarBackend:
        assert self._create is not None, "there is an engine"
        with self._creating:
            if self._backend is None:
                backend = self._create()
                with self._changed:
                    closed = self._closed
                    if not closed:
                        self._backend = backend
                if closed:
                    backend.close()
                    raise RequestError("the engine is closing", param="grammar", status=503)
                return backend
            return self._backend

    def _ready_vocabulary(self) -> None:
        assert self._load_vocabulary is not None, "an engine has a tokenizer"
        with self._creating:
            if self.vocabulary is None:
                self.vocabulary = self._load_vocabulary()

    def _end(
        self, compilation: Compilation, grammar: CompiledGrammar | None, error: RequestError | None
    ) -> None:
        """Note a result; the lock is held."""
        self._running.remove(compilation)
        del self._current[compilation.spec, compilation.wants_vocabulary]
        compilation.grammar, compilation.error, compilation.done = grammar, error, True
        if grammar is not None:
            self._keep(compilation.spec, grammar)
        self._changed.notify_all()

    def _keep(self, spec: GrammarSpec, grammar: CompiledGrammar) -> None:
        if (before := self._cached.pop(spec, None)) is not None:
            self._cached_bytes -= before.num_bytes + len(spec.value)
        self._cached[spec] = grammar
        self._cached_bytes += grammar.num_bytes + len(spec.value)
        while len(self._cached) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            oldest, dropped = self._cached.popitem(last=False)
            self._cached_bytes -= dropped.num_bytes + len(oldest.value)


def took_too_long(spec: GrammarSpec, timeout_s: float) -> RequestError:
    """Return the error of a grammar that cannot be compiled in time."""
    return RequestError(
        f"grammar ({spec.kind}) cannot be compiled within {timeout_s:g} s "
        "(structured.compile_timeout_s); make it simpler",
        param="grammar",
    )
