"""The API server's way to the engine: requests out, replies of each request in order.

Every request that was sent ends in one of three ways: its terminal reply came, it failed, or its
``Generation`` was closed, which aborts what still runs. In each case its entry here is gone.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from minisgl.errors import RequestError, without_messages
from minisgl.message import (
    AbortRequest,
    BackendMessage,
    DetokenizeOnly,
    ErrorReply,
    FrontendMessage,
    Pong,
    ReplyBatch,
    TextReply,
    TokenizeOnly,
    TokenizeRequest,
    TokenizerMessage,
    TokensReply,
)
from minisgl.request import SamplingParams
from minisgl.server.generation import Generation, error_of
from minisgl.server.heartbeat import Heartbeat

logger = logging.getLogger(__name__)
logger.addFilter(without_messages)

Prompt = str | list[int] | list[dict[str, Any]]


class Sender(Protocol):
    """Where messages go, such as a ``PushSocket``."""

    def send(self, message: Any, /) -> None:
        """Queue the message; must not block."""


class Receiver(Protocol):
    """Where replies come from, such as an ``AsyncPullSocket``."""

    async def receive(self) -> list[FrontendMessage]:
        """Wait for replies and return all that are there."""


class Observer(Protocol):
    """Follows answers, such as ``EngineMetrics``; what it raises is logged and goes no further."""

    def asked(self, uids: Sequence[int]) -> None:
        """Called when answers have been asked for."""

    def replied(self, replies: Sequence[TextReply]) -> None:
        """Called for each step's replies."""

    def failed(self, reply: ErrorReply) -> None:
        """Called when an answer was refused or failed."""

    def left(self, uids: Sequence[int]) -> None:
        """Called when the client has left while these answers ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one server takes on.

    Attributes:
        max_open: answers that run or wait, and questions to the tokenizer, at once.
        request_timeout: seconds that an answer may take; ``None`` sets no limit.
    """

    max_open: int | None = None
    request_timeout: float | None = None

    def timeout(self, asked: float | None) -> float | None:
        """Return the seconds that an answer may take, given those that its request allows."""
        both = [limit for limit in (asked, self.request_timeout) if limit is not None]
        return min(both, default=None)


class EngineClient:
    """Numbers requests, sends them, and hands each reply to its request.

    Args:
        tokenizer: where ``TokenizeRequest`` goes.
        scheduler: where aborts and pings go.
        replies: where workers answer.
        limits: on what is open at once, and for how long.
    """

    def __init__(
        self,
        *,
        tokenizer: Sender,
        scheduler: Sender,
        replies: Receiver,
        limits: ClientLimits | None = None,
    ) -> None:
        self._limits = limits or ClientLimits()
        self._tokenizer: Sender = tokenizer
        self._scheduler: Sender = scheduler
        self._replies = replies
        self._generations: dict[int, Generation] = {}
        self._questions: dict[int, asyncio.Future[TokensReply]] = {}
        self._next_uid = itertools.count(1)
        self._failure: RequestError | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.heartbeat = Heartbeat(scheduler.send)
        self.observer: Observer | None = None

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""
        return len(self._generations)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        options: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Generation:
        """Send one request and return its replies; close the result.

        Args:
            prompts: each gets its own answers.
            params: of one answer to each prompt, or one for each of several.
            priority: a higher number is served earlier.
            cache_salt: only requests with the same one share cached prefixes.
            timeout: seconds that the answers may take in all; the server's own limit may be less.
            options: more fields of ``TokenizeRequest``: how prompts become tokens.
            names: of request fields as the client knows them, for errors of the engine.

        Raises:
            RequestError: the server stops, is full or has failed, or a value cannot be sent.
        """
        self.check_accepting()
        each = [params] if isinstance(params, SamplingParams) else params
        self._check_room(len(prompts) * len(each))
        uids: list[int] = []
        first: list[TokenizeRequest] = []
        followers: dict[int, list[TokenizeRequest]] = {}
        for prompt in prompts:
            requests = [
                TokenizeRequest(
                    next(self._next_uid),
                    prompt,
                    one,
                    priority=priority,
                    cache_salt=cache_salt,
                    **(options or {}),
                )
                for one in each
            ]
            uids += [request.uid for request in requests]
            first.append(requests[0])
            if len(requests) > 1:
                followers[requests[0].uid] = requests[1:]
        generation = Generation(self, uids, followers, names)
        for uid in uids:
            self._generations[uid] = generation
        generation.end_after(self._limits.timeout(timeout))
        self._idle.clear()
        if self.observer is not None:
            self._observe(self.observer.asked, uids)
        try:
            self.start(first)
        except BaseException:
            generation.close()
            raise
        return generation

    def start(self, requests: Sequence[TokenizeRequest]) -> None:
        """Send requests to the tokenizer.

        Raises:
            RequestError: a value cannot be sent.
        """
        for request in requests:
            self._send_to_tokenizer(request)

    async def tokens(self, ask: Callable[[int], TokenizeOnly | DetokenizeOnly]) -> TokensReply:
        """Return the tokenizer's answer.

        Args:
            ask: makes the question, given the engine's number for it.

        Raises:
            RequestError: the question is refused, or the server stops or is full.
        """
        self.check_accepting()
        self._check_room(1)
        uid = next(self._next_uid)
        answer: asyncio.Future[TokensReply] = asyncio.get_running_loop().create_future()
        self._questions[uid] = answer
        try:
            self._send_to_tokenizer(ask(uid))
            return await answer
        finally:
            del self._questions[uid]

    def _send_to_tokenizer(self, message: TokenizerMessage) -> None:
        try:
            self._tokenizer.send(message)
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError) as error:
            raise RequestError(f"the request holds a value that cannot be read: {error}") from error

    def check_accepting(self) -> None:
        """Raise the ``RequestError`` that new requests get, if they are not accepted."""
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise RequestError("the server is shutting down", status=503, code="shutting_down")

    def _check_room(self, num_new: int) -> None:
        """Refuse what would wait behind too many others."""
        limit = self._limits.max_open
        if limit is None:
            return
        if num_new > limit:
            raise RequestError(
                f"a request of {num_new} answers is more than this server holds ({limit}: "
                "scheduler.max_running_requests and server.max_queued_requests); send it in parts"
            )
        num_open = len(self._generations) + len(self._questions)
        if num_open + num_new > limit:
            raise RequestError(
                f"the server is full: {num_open} answers run or wait, and it holds {limit}; "
                "try again later",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                code="queue_full",
            )

    def note_failures(self, replies: Sequence[ErrorReply]) -> None:
        """Tell the observer of answers that end without the engine's having said so."""
        if self.observer is not None:
            for reply in replies:
                self._observe(self.observer.failed, reply)

    def forget(self, uids: Sequence[int], *, running: Sequence[int]) -> None:
        """Drop the entries of ``uids`` and abort those that are still ``running``."""
        for uid in uids:
            self._generations.pop(uid, None)
        if not self._generations:
            self._idle.set()
        if self.observer is not None:
            self._observe(self.observer.left, uids)
        if running and self._failure is None:
            abort: BackendMessage = AbortRequest(list(running))
            self._scheduler.send(abort)

    async def listen(self) -> None:
        """Hand out replies until cancelled; a bad message never ends this."""
        while True:
            for message in await self._replies.receive():
                try:
                    self._dispatch(message)
                except Exception:
                    logger.exception("dropped a reply")

    def _dispatch(self, message: FrontendMessage) -> None:
        match message:
            case ReplyBatch(replies=replies):
                if self.observer is not None:
                    self._observe(self.observer.replied, replies)
                for reply in replies:
                    if (generation := self._generations.get(reply.uid)) is not None:
                        generation.put(reply)
            case ErrorReply(uid=uid):
                if (generation := self._generations.get(uid)) is not None:
                    self.note_failures([message])
                    generation.put(message)
                elif (question := self._questions.get(uid)) is not None and not question.done():
                    question.set_exception(error_of(message))
            case TokensReply(uid=uid):
                if (question := self._questions.get(uid)) is not None and not question.done():
                    question.set_result(message)
            case Pong():
                self.heartbeat.take(message)

    @staticmethod
    def _observe(tell: Callable[[Any], None], what: Any) -> None:
        try:
            tell(what)
        except Exception:
            logger.exception("an observer of requests has failed")

    def why_unhealthy(self) -> str | None:
        """Return why the server cannot serve now, or ``None`` if it can."""
        if self._failure is not None:
            return self._failure.message
        if self._draining:
            return "the server is shutting down"
        return self.heartbeat.why_unhealthy()

    def stop_accepting(self) -> None:
        """Refuse new requests with 503 from now on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def fail_all(self, error: RequestError) -> None:
        """End every open request with ``error``, and refuse new ones with it."""
        self._failure = error
        for uid, generation in list(self._generations.items()):
            reply = ErrorReply(uid, error.message, error.status, error.param, error.code)
            self.note_failures([reply])
            generation.put(reply)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error)
