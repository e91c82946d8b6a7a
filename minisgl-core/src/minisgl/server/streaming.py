"""Responses that end with their client: SSE streams, and waiting that a disconnect interrupts."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from minisgl.errors import RequestError
from minisgl.server.errors import SEND_KEY, ClientGoneError, error_body, is_anthropic
from minisgl.server.generation import Generation

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

DONE = b"data: [DONE]\n\n"


def sse_event(data: Any, name: str | None = None) -> bytes:
    """Return ``data`` as one server-sent event, which may have a name."""
    event = b"" if name is None else f"event: {name}\n".encode()
    return b"%bdata: %b\n\n" % (event, msgspec.json.encode(data))


def error_event(error: RequestError, path: str) -> bytes:
    """Return the last event of a stream that has failed; Anthropic's has a name."""
    return sse_event(error_body(error, path), "error" if is_anthropic(path) else None)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of ``work``, which is cancelled if the client goes away first.

    Args:
        receive: the ASGI channel, after the request's body was read.
        work: what the client waits for.

    Raises:
        ClientGoneError: the client has closed the connection.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancel(task, watcher)


async def _disconnect(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class EventStreamResponse(Response):
    """Sends events as they come; when the client goes away, or at the end, it closes everything.

    Args:
        events: encoded server-sent events; a ``RequestError`` from it becomes the last event.
        generation: closed at the end, which aborts what still runs.
        path: of the request, which decides on the form of errors.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], generation: Generation, *, path: str = ""
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream, as an ASGI application."""
        try:
            await unless_disconnected(receive, self._send_all(send, scope.get(SEND_KEY, send)))
        except (ClientGoneError, OSError):
            logger.debug("the client closed its stream")
        finally:
            self._generation.close()
            await self._events.aclose()

    async def _send_all(self, send_head: Send, send: Send) -> None:
        await send_head({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_body(send, event)
        except RequestError as error:
            await _send_body(send, error_event(error, self._path))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _send_body(send: Send, body: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": body, "more_body": True})
