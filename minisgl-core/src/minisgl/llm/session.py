"""A scheduler in this process, with its tokenizer on both sides: what both LLM classes drive."""

import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.bootstrap import build_scheduler, load_host
from minisgl.errors import EngineLostError, RequestError, SettingsError
from minisgl.llm.interrupts import interrupts_at_the_end
from minisgl.llm.results import ENGINE_LOST, Prompt
from minisgl.message import AbortRequest, ErrorReply, GenerateRequest, TextReply
from minisgl.plugins.host import PluginHost
from minisgl.request import SamplingParams
from minisgl.scheduler.admission import validate
from minisgl.scheduler.interfaces import StepEngine
from minisgl.scheduler.transport import MemoryTransport
from minisgl.settings import Settings, settings_from_keywords
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.encoding import PromptEncoder
from minisgl.tokenizer.token_ids import NO_TOKENIZER, TokenIdEncoder, TokenIdStreams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Listener = Callable[[TextReply | ErrorReply], None]


class Session:
    """Submits requests, runs steps, and delivers each reply to its request's listener.

    Safe to call from several threads: whoever waits for an answer runs the steps, one at a time.

    Args:
        settings: everything.
        progress: show a progress bar while the model loads.

    Attributes:
        info: facts about the engine.
        tokenizer: the model's; ``None`` with ``model.skip_tokenizer_init``.
    """

    def __init__(self, settings: Settings, *, progress: bool = True) -> None:
        host = load_host(settings)
        self._transport = MemoryTransport()
        self._scheduler = build_scheduler(settings, self._transport, host, progress=progress)
        self.info = self._scheduler.info
        try:
            self.tokenizer = self._load_tokenizer(settings, host)
        except BaseException:
            self._scheduler.close()
            raise
        self._encoder: PromptEncoder | TokenIdEncoder
        self._detokenizer: Detokenizer | TokenIdStreams
        if self.tokenizer is None:
            self._encoder = TokenIdEncoder(self.info.vocab_size)
            self._detokenizer = TokenIdStreams()
        else:
            self._encoder = PromptEncoder(self.tokenizer, vocab_size=self.info.vocab_size)
            self._detokenizer = Detokenizer(self.tokenizer)
        self._listeners: dict[int, Listener] = {}
        self._uids = itertools.count()
        self._lock = threading.RLock()
        self._closed = False

    @property
    def engine(self) -> StepEngine:
        """What runs the steps."""
        return self._scheduler.engine

    def require_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer.

        Raises:
            SettingsError: this session has none.
        """
        if self.tokenizer is None:
            raise SettingsError(f"{NO_TOKENIZER}; leave that setting out to have one")
        return self.tokenizer

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> GenerateRequest:
        """Return the request for ``prompt``, checked; nothing runs before ``submit``.

        Raises:
            RequestError: it can never be served as asked.
            RuntimeError: the session is closed.
        """
        self._check_open()
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be a SamplingParams, got {params!r}",
                param="sampling_params",
            )
        if params.stop and self.tokenizer is None:
            raise RequestError(f"stop strings cannot be found: {NO_TOKENIZER}", param="stop")
        data = np.array(self._encoder.encode(prompt), dtype="<i4").tobytes()
        params = self._encoder.with_bad_token_ids(params)
        request = GenerateRequest(next(self._uids), data, params, priority, cache_salt)
        validate(request, self.info)
        return request

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Queue a prepared request; never waits for a running step.

        Raises:
            RuntimeError: the session is closed.
        """
        self._check_open()
        self._listeners[request.uid] = listener
        self._transport.inbox.append(request)

    def abort(self, uid: int) -> None:
        """End a request, if it still runs; its listener gets the reason ``abort``."""
        if uid in self._listeners:
            self._transport.inbox.append(AbortRequest([uid]))

    def step(self) -> bool:
        """Run one step and deliver what it made; returns whether there is more to do."""
        with self._lock, interrupts_at_the_end():
            try:
                self._scheduler.receive(0)
                self._scheduler.step()
                self._deliver()
            except BaseException as error:
                # A step that did not reach its end cannot be repeated or gone on from.
                self._fail_all(error)
                raise
            return self.has_work

    @property
    def has_work(self) -> bool:
        """Whether any request is unanswered."""
        return not self._closed and bool(self._scheduler.has_work or self._transport.inbox)

    def settle(self) -> None:
        """Let the scheduler take note of aborts and stop strings whose answers are complete.

        Nobody waits for those, so nobody else would run the steps that free their pages.
        """
        with self._lock:
            while self.has_work and (self._transport.inbox or not self._listeners):
                self.step()

    def close(self) -> None:
        """Abort what runs and drop the engine; later calls raise."""
        with self._lock:
            if self._closed:
                return
            for uid in list(self._listeners):
                self.abort(uid)
            while self.has_work:
                self.step()
            self._closed = True
            self._scheduler.close()
            del self._scheduler

    @staticmethod
    def _load_tokenizer(settings: Settings, host: PluginHost) -> "PreTrainedTokenizerBase | None":
        if settings.model.skip_tokenizer_init:
            return None
        reference = settings.model.tokenizer or settings.model.path
        assert reference is not None, "the scheduler has refused settings without a model"
        path: Path = host.resolve_checkpoint(reference, settings.model.cache_dir)
        # transformers' tokenizers bring its text generation along, which takes seconds to import.
        from minisgl.tokenizer.loading import load_tokenizer

        return load_tokenizer(path)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed; make a new one")

    def _deliver(self) -> None:
        for batch in self._transport.outbox:
            replies, stops = self._detokenizer.process(batch)
            self._transport.inbox.extend(stops)
            for reply in replies:
                self._reply(reply)
        self._transport.outbox.clear()

    def _reply(self, reply: TextReply | ErrorReply) -> None:
        is_last = isinstance(reply, ErrorReply) or reply.finish_reason is not None
        listener = (
            self._listeners.pop(reply.uid, None) if is_last else self._listeners.get(reply.uid)
        )
        if listener is not None:
            listener(reply)

    def _fail_all(self, error: BaseException) -> None:
        """Answer everybody when the engine is broken: nobody is left waiting."""
        self._closed = True
        cause = str(error) or type(error).__name__
        logger.error("the engine is broken: %s", cause)
        lost = isinstance(error, EngineLostError)
        message, code = (cause, ENGINE_LOST) if lost else (f"the engine failed: {cause}", None)
        for uid in list(self._listeners):
            self._reply(ErrorReply(uid, message, status=500, code=code))
        self._scheduler.close()


def to_settings(model: str | None, settings: Settings | None, keywords: dict[str, Any]) -> Settings:
    """Return the settings that an LLM class was given: ready-made, or as keywords.

    Raises:
        SettingsError: a keyword is unknown or a value is wrong.
        TypeError: both forms were given.
    """
    if settings is None:
        return settings_from_keywords(model=model, **keywords)
    given = [*(["model"] if model is not None else []), *keywords]
    if given:
        raise TypeError(f"give either settings or keywords, not both: {', '.join(given)}")
    return settings
