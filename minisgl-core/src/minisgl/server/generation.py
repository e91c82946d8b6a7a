"""The replies to one HTTP request, in order, and what the engine still does for it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec

from minisgl.errors import RequestError
from minisgl.message import ErrorReply, TextReply, TokenizeRequest
from minisgl.server.errors import renamed

MAX_MERGED_TEXT: Final = 1000


class Owner(Protocol):
    """What a generation needs of its ``EngineClient``."""

    def start(self, requests: Sequence[TokenizeRequest]) -> None:
        """Send requests to the tokenizer."""

    def note_failures(self, replies: Sequence[ErrorReply]) -> None:
        """Count answers that end without the engine's having said so."""

    def forget(self, uids: Sequence[int], *, running: Sequence[int]) -> None:
        """Drop the entries of ``uids`` and abort those that are still ``running``."""


class Generation:
    """The replies to one HTTP request: ``n`` answers to each of its prompts.

    Used as ``async with client.generate(...) as generation: async for index, reply in generation``;
    leaving the block aborts what has not finished. Answer ``k`` of prompt ``p`` has the index
    ``p * n + k``.

    Args:
        owner: sends and aborts.
        uids: the engine's numbers of the answers, by index.
        followers: requests by the uid of another answer to the same prompt. They are sent once that
            one has its first reply: by then the prompt is in the prefix cache, and is not computed
            again.
        names: of request fields as the client knows them, by those that the engine uses.
    """

    def __init__(
        self,
        owner: Owner,
        uids: Sequence[int],
        followers: Mapping[int, Sequence[TokenizeRequest]] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._owner = owner
        self._index_of = {uid: index for index, uid in enumerate(uids)}
        self._followers = dict(followers or {})
        self._names = names or {}
        self._running = set(uids)
        self._replies: deque[TextReply | ErrorReply] = deque()
        self._arrived = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._late: set[int] = set()

    @property
    def uids(self) -> tuple[int, ...]:
        """The engine's numbers of the answers, by index."""
        return tuple(self._index_of)

    def end_after(self, seconds: float | None) -> None:
        """Let the request fail unless all its answers end within ``seconds``."""
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._time_out, seconds)

    def _time_out(self, seconds: float) -> None:
        message = f"the answer was not complete within {seconds:g} s (timeout)"
        status = HTTPStatus.GATEWAY_TIMEOUT.value
        late = [
            ErrorReply(uid, message, status, "timeout", "timeout") for uid in sorted(self._running)
        ]
        if late:
            self._owner.note_failures(late)
            self._late = set(self._running)  # to us these have ended, to the engine they have not
            self._replies.append(late[0])
            self._arrived.set()

    def put(self, reply: TextReply | ErrorReply) -> None:
        """Take a reply; called by the client's listener.

        What a slow reader has not taken yet is merged, so that it catches up in fewer chunks.
        """
        if self._followers and reply.uid in self._followers:
            self._start_followers(reply)
        last = self._replies[-1] if self._replies else None
        if (
            isinstance(last, TextReply)
            and isinstance(reply, TextReply)
            and last.uid == reply.uid
            and last.finish_reason is None
            and len(last.text) < MAX_MERGED_TEXT
        ):
            self._replies[-1] = merged(last, reply)
        else:
            self._replies.append(reply)
        self._arrived.set()

    def _start_followers(self, reply: TextReply | ErrorReply) -> None:
        """Let the other answers to a prompt begin, unless the prompt has been refused."""
        if not isinstance(reply, TextReply):
            return
        waiting = self._followers.pop(reply.uid)
        try:
            self._owner.start(waiting)
        except RequestError as error:  # nobody else would end the answers that wait
            self._replies.append(
                ErrorReply(waiting[0].uid, error.message, error.status, error.param, error.code)
            )

    async def first(self) -> None:
        """Wait until the first reply is there; the iteration still yields it.

        Raises:
            RequestError: the request was refused, so an HTTP status can still say so.
        """
        await self._wait()
        if self._replies and isinstance(self._replies[0], ErrorReply):
            self._take()

    async def batches(self) -> AsyncIterator[list[tuple[int, TextReply]]]:
        """Yield all replies that are there, whenever there are some, until every answer has ended.

        Raises:
            RequestError: an answer has failed; what came before it has been yielded.
        """
        while self._running:
            await self._wait()
            found = [self._take()]
            while self._replies and not isinstance(self._replies[0], ErrorReply):
                found.append(self._take())
            yield found

    def __aiter__(self) -> AsyncIterator[tuple[int, TextReply]]:
        return self

    async def __anext__(self) -> tuple[int, TextReply]:
        if not self._running:
            raise StopAsyncIteration
        await self._wait()
        return self._take()

    async def _wait(self) -> None:
        while not self._replies and self._running:
            self._arrived.clear()
            await self._arrived.wait()

    def _take(self) -> tuple[int, TextReply]:
        reply = self._replies.popleft()
        if isinstance(reply, ErrorReply):
            self._running.discard(reply.uid)
            raise renamed(error_of(reply), self._names)
        if reply.finish_reason is not None:
            self._running.discard(reply.uid)
            self._late.discard(reply.uid)
        return self._index_of[reply.uid], reply

    def close(self) -> None:
        """Forget the request; abort the answers that still run."""
        if self._timer is not None:
            self._timer.cancel()
        unsent = {request.uid for group in self._followers.values() for request in group}
        self._owner.forget(self.uids, running=sorted((self._running | self._late) - unsent))
        self._running.clear()
        self._followers.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def error_of(reply: ErrorReply) -> RequestError:
    """Return the error that a reply carries."""
    return RequestError(reply.message, param=reply.param, status=reply.status, code=reply.code)


def merged(first: TextReply, second: TextReply) -> TextReply:
    """Return one reply that says what two of the same answer say."""
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt=first.prompt or second.prompt,
        prompt_tail=first.prompt_tail or second.prompt_tail,
    )
