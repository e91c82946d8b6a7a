"""What happens to every HTTP request, whatever its route: its id, its key and its body's size."""

import asyncio
import hmac
import re
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import RequestError
from minisgl.server.errors import (
    REQUEST_ID_HEADER,
    REQUEST_ID_KEY,
    SEND_KEY,
    error_response,
    id_header,
    request_id,
)
from minisgl.server.metrics import HttpMetrics

KNOWN_METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
MAX_OPEN_BODY_BYTES: Final = 2**30
"""Most bytes that the bodies of all open requests may have together."""
BODY_TIMEOUT_S: Final = 60.0
"""Seconds within which more of a request body must come."""
_FROM_HEADER: Final = f"{REQUEST_ID_KEY}.is_from_header"
_VALID_ID: Final = re.compile(rb"[!-~]{1,256}")


def name_request(scope: Scope, name: str | None) -> str:
    """Take the id from the request's body, unless a header has named it; return its id."""
    if name is not None and not scope.get(_FROM_HEADER):
        scope[REQUEST_ID_KEY] = name
    return request_id(scope)


class RequestMiddleware:
    """Gives every request an id, its own or a new one, sends it back, and counts the request.

    The outermost one of this server: behind it stands the send of the HTTP server itself, which
    streams take for all but their head (``SEND_KEY``): each layer in between costs a call a token.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; a malformed id is a 400, and a crash counts as 500.

        One that the server's end cuts off gets a 503.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID_KEY] = uuid.uuid4().hex
        scope[SEND_KEY] = send
        status, has_begun = HTTPStatus.INTERNAL_SERVER_ERROR.value, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                status = message["status"]
                named = id_header(scope).items()
                found = [(name.lower().encode(), value.encode()) for name, value in named]
                message["headers"] = [*message["headers"], *found]
            await send(message)

        try:
            refusal = self._take_id(scope)
            if refusal is None:
                await self._app(scope, receive, send_with_id)
            else:
                await refusal(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # The server ends, and this request's body has not come in time: it, too, has an answer.
            if has_begun:
                raise
            late = RequestError("the server is shutting down", status=503, code="shutting_down")
            await error_response(late, path=scope["path"])(scope, receive, send_with_id)
        finally:
            # Only known routes and methods are labels: a client must not invent new ones.
            route = getattr(scope.get("route"), "path", None)
            method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
            self._metrics.count(route or "other", method, status)

    @staticmethod
    def _take_id(scope: Scope) -> Response | None:
        """Take the id of the header, if there is one; return the refusal of one that is wrong."""
        given = _header(scope, REQUEST_ID_HEADER.lower().encode())
        if given is None:
            return None
        if not _VALID_ID.fullmatch(given):
            error = RequestError(
                f"{REQUEST_ID_HEADER} must be 1 to 256 printable ASCII characters without spaces",
                param=REQUEST_ID_HEADER,
            )
            return error_response(error, path=scope["path"])
        scope[REQUEST_ID_KEY] = given.decode()
        scope[_FROM_HEADER] = True
        return None


class BodyMiddleware:
    """Keeps request bodies from filling the memory: each has a limit, and all of them together.

    A body counts until its request has been answered. One that stops coming is given up.

    Args:
        app: what reads them.
        max_bytes: of one body; a larger one is a 413.
        max_total_bytes: of the bodies of all open requests; then a request gets 429.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_total_bytes: int = MAX_OPEN_BODY_BYTES
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_total = max(max_total_bytes, max_bytes)
        self._total = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with a ``receive`` that counts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size, complete = 0, False

        async def counted() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await receive()
            except TimeoutError:
                raise RequestError(
                    f"nothing more of the request body came for {BODY_TIMEOUT_S:g} s",
                    status=HTTPStatus.REQUEST_TIMEOUT,
                    code="request_timeout",
                ) from None
            size += len(message.get("body", b""))
            self._total += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            self._check(size)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._total -= size

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise RequestError(
                f"the request body is larger than {self._max_bytes} bytes (server.max_body_bytes)",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                code="request_too_large",
            )
        if self._total > self._max_total:
            raise RequestError(
                f"the bodies of all open requests are larger than {self._max_total} bytes; try "
                "again later",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                code="queue_full",
            )


class ApiKeyMiddleware:
    """Refuses requests without a known key, on every route but ``/health``.

    The key comes as OpenAI's clients send it (``Authorization: Bearer KEY``), or as Anthropic's do
    (``X-Api-Key: KEY``).
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        refusal = error_response(
            RequestError(
                "a valid key is needed: send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                status=401,
                code="invalid_api_key",
            ),
            {"WWW-Authenticate": "Bearer"},
            path=scope["path"],
        )
        await refusal(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        bare = _header(scope, b"x-api-key")
        if bare is not None and self._is_known(bare.strip()):
            return True
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and self._is_known(key.strip())

    def _is_known(self, given: bytes) -> bool:
        """Compare with every key, so that the time says nothing about any of them."""
        equal = [hmac.compare_digest(given, key) for key in self._expected]
        return any(equal)


def _header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header, given its name in lower case."""
    found: bytes | None = next((value for key, value in scope["headers"] if key == name), None)
    return found
