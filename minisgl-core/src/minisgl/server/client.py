"""The API server's way to the engine: requests out, replies of each request in order.

Every request that was sent ends in one of three ways: its terminal reply came, it failed, or its
``Generation`` was closed, which aborts what still runs. In each case its entry here is gone.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

import msgspec

from minisgl.errors import RequestError
from minisgl.message import (
    AbortRequest,
    BackendMessage,
    ErrorReply,
    FrontendMessage,
    Ping,
    Pong,
    ReplyBatch,
    TextReply,
    TokenizeRequest,
    TokenizerMessage,
)
from minisgl.request import SamplingParams

logger = logging.getLogger(__name__)

Prompt = str | list[int] | list[dict[str, Any]]

PING_INTERVAL: Final = 1.0
MAX_MERGED_TEXT: Final = 1000
HEARTBEAT_TIMEOUT: Final = 10.0
"""Seconds without a heartbeat after which the server calls itself unhealthy."""


class Sender(Protocol):
    """Where messages go, such as a ``PushSocket``."""

    def send(self, message: Any, /) -> None:
        """Queue the message; must not block."""


class Receiver(Protocol):
    """Where replies come from, such as an ``AsyncPullSocket``."""

    async def receive(self) -> list[FrontendMessage]:
        """Wait for replies and return all that are there."""


class Generation:
    """The replies to one HTTP request, which may hold several prompts.

    Used as ``async with client.generate(...) as generation: async for index, reply in generation``;
    leaving the block aborts what has not finished.
    """

    def __init__(self, client: "EngineClient", uids: Sequence[int]) -> None:
        self._client = client
        self._index_of = {uid: index for index, uid in enumerate(uids)}
        self._running = set(uids)
        self._replies: deque[TextReply | ErrorReply] = deque()
        self._arrived = asyncio.Event()
        self._ahead: tuple[int, TextReply] | None = None

    @property
    def uids(self) -> tuple[int, ...]:
        """The engine's numbers of the prompts, in their order."""
        return tuple(self._index_of)

    def put(self, reply: TextReply | ErrorReply) -> None:
        """Take a reply; called by the client's listener.

        What a slow reader has not taken yet is merged, so that it catches up in fewer chunks.
        """
        last = self._replies[-1] if self._replies else None
        if (
            isinstance(last, TextReply)
            and isinstance(reply, TextReply)
            and last.uid == reply.uid
            and last.finish_reason is None
            and len(last.text) < MAX_MERGED_TEXT
        ):
            self._replies[-1] = msgspec.structs.replace(
                reply, text=last.text + reply.text, token_ids=last.token_ids + reply.token_ids
            )
        else:
            self._replies.append(reply)
        self._arrived.set()

    async def first(self) -> None:
        """Wait until the first reply is there; the iteration still yields it.

        Raises:
            RequestError: the request was refused, so an HTTP status can still say so.
        """
        if self._ahead is None and self._running:
            self._ahead = await self._next()

    def __aiter__(self) -> AsyncIterator[tuple[int, TextReply]]:
        return self

    async def __anext__(self) -> tuple[int, TextReply]:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return ahead
        if not self._running:
            raise StopAsyncIteration
        return await self._next()

    async def _next(self) -> tuple[int, TextReply]:
        while not self._replies:
            self._arrived.clear()
            await self._arrived.wait()
        reply = self._replies.popleft()
        if isinstance(reply, ErrorReply):
            self._running.discard(reply.uid)
            raise RequestError(
                reply.message, param=reply.param, status=reply.status, code=reply.code
            )
        if reply.finish_reason is not None:
            self._running.discard(reply.uid)
        return self._index_of[reply.uid], reply

    def close(self) -> None:
        """Forget the request; abort the prompts that still run."""
        self._client.forget(self.uids, running=sorted(self._running))
        self._running.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class EngineClient:
    """Numbers requests, sends them, and hands each reply to its request.

    Args:
        tokenizer: where ``TokenizeRequest`` goes.
        scheduler: where aborts and pings go.
        replies: where workers answer.
    """

    def __init__(self, *, tokenizer: Sender, scheduler: Sender, replies: Receiver) -> None:
        self._tokenizer: Sender = tokenizer
        self._scheduler: Sender = scheduler
        self._replies = replies
        self._generations: dict[int, Generation] = {}
        self._next_uid = itertools.count(1)
        self._next_ping = itertools.count(1)
        self._last_pong: float | None = None
        self._failure: RequestError | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.last_heartbeat: Pong | None = None

    @property
    def num_open(self) -> int:
        """Prompts that have not ended."""
        return len(self._generations)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Generation:
        """Send one request a prompt and return their replies; close the result.

        Raises:
            RequestError: the server stops or has failed, or a value cannot be sent.
        """
        self.check_accepting()
        uids = [next(self._next_uid) for _ in prompts]
        generation = Generation(self, uids)
        for uid in uids:
            self._generations[uid] = generation
        self._idle.clear()
        try:
            for uid, prompt in zip(uids, prompts, strict=True):
                message: TokenizerMessage = TokenizeRequest(
                    uid,
                    prompt,
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    template_kwargs=dict(template_kwargs or {}),
                    add_generation_prompt=add_generation_prompt,
                )
                self._tokenizer.send(message)
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError) as error:
            generation.close()
            raise RequestError(f"the request holds a value that cannot be read: {error}") from error
        return generation

    def check_accepting(self) -> None:
        """Raise the ``RequestError`` that new requests get, if they are not accepted."""
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise RequestError("the server is shutting down", status=503, code="shutting_down")

    def forget(self, uids: Sequence[int], *, running: Sequence[int]) -> None:
        """Drop the entries of ``uids`` and abort those that are still ``running``."""
        for uid in uids:
            self._generations.pop(uid, None)
        if not self._generations:
            self._idle.set()
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
                for reply in replies:
                    if (generation := self._generations.get(reply.uid)) is not None:
                        generation.put(reply)
            case ErrorReply(uid=uid):
                if (generation := self._generations.get(uid)) is not None:
                    generation.put(message)
            case Pong():
                self._last_pong = time.monotonic()
                self.last_heartbeat = message

    async def ping(self) -> None:
        """Ask the scheduler for its heartbeat every second until cancelled."""
        while True:
            message: BackendMessage = Ping(next(self._next_ping))
            self._scheduler.send(message)
            await asyncio.sleep(PING_INTERVAL)

    def load(self) -> dict[str, int]:
        """Return what the scheduler's last heartbeat said: requests, pages, steps."""
        beat = self.last_heartbeat
        if beat is None:
            return {}
        return {
            "num_running": beat.num_running,
            "num_waiting": beat.num_waiting,
            "num_free_pages": beat.num_free_pages,
            "num_pages": beat.num_pages,
            "num_steps": beat.num_steps,
        }

    def why_unhealthy(self) -> str | None:
        """Return why the server cannot serve now, or ``None`` if it can."""
        if self._failure is not None:
            return self._failure.message
        if self._draining:
            return "the server is shutting down"
        if self._last_pong is None:
            return "the scheduler has not answered yet"
        age = time.monotonic() - self._last_pong
        if age > HEARTBEAT_TIMEOUT:
            return f"the scheduler has not answered for {age:.0f} s"
        return None

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
            generation.put(ErrorReply(uid, error.message, error.status, error.param, error.code))
