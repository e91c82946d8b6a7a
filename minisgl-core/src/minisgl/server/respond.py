"""From an HTTP request's body to its answer, whole or as a stream, for every protocol alike."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec
from fastapi import Request
from fastapi.responses import Response

from minisgl.server.generation import Generation
from minisgl.server.streaming import EventStreamResponse, unless_disconnected


class Answer(Protocol):
    """Makes the answer of one protocol out of replies."""

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """Return the whole answer once every choice has ended.

        Raises:
            RequestError: a prompt was refused or failed.
        """

    def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the encoded stream; a ``RequestError`` ends it with an error event."""


async def read_body(request: Request) -> bytes:
    """Return the request's body.

    Raises:
        RequestError: it is too large, see ``BodyMiddleware``.
    """
    return await request.body()


def json_response(body: Any) -> Response:
    """Return ``body`` as a response."""
    return Response(msgspec.json.encode(body), media_type="application/json")


async def respond(
    request: Request, generation: Generation, answer: Answer, *, stream: bool
) -> Response:
    """Wait for the answer and return it, whole or as a stream; the generation is closed at its end.

    The stream's status line waits for the first reply, so that a refusal is still a 400.

    Raises:
        RequestError: the request was refused or failed.
        ClientGoneError: nobody waits for the answer any more.
    """
    streaming = False
    try:
        if not stream:
            body = await unless_disconnected(request.receive, answer.collect(generation))
            return json_response(body)
        await unless_disconnected(request.receive, generation.first())
        streaming = True
        return EventStreamResponse(
            answer.events(generation), generation, path=request.scope["path"]
        )
    finally:
        if not streaming:
            generation.close()
