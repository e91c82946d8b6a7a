"""From an HTTP request's body to its answer, whole or as a stream, for every protocol alike."""

from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any, Final, Protocol

import msgspec
from fastapi import Request
from fastapi.responses import Response

from minisgl.errors import RequestError
from minisgl.server.generation import Generation
from minisgl.server.streaming import EventStreamResponse, unless_disconnected

MAX_BODY_BYTES: Final = 16 * 2**20
"""Largest request body; one of token ids for a context of a million still fits."""


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
        RequestError: it is larger than what any request needs.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                f"the request body is larger than {MAX_BODY_BYTES} bytes",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                code="request_too_large",
            )
    return bytes(body)


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
