"""Every HTTP error in its protocol's form.

OpenAI's is ``{"error": {"message", "type", "param", "code"}}``; below ``/v1/messages`` it is
Anthropic's: ``{"type": "error", "error": {"type", "message"}}``.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from minisgl.errors import RequestError

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5
CLIENT_CLOSED_REQUEST = 499
REQUEST_ID_HEADER: Final = "X-Request-Id"
ANTHROPIC_ID_HEADER: Final = "Request-Id"
REQUEST_ID_KEY: Final = "minisgl.request_id"
"""Where a request's ASGI scope holds its id."""
SEND_KEY: Final = "minisgl.send"
"""Where a request's ASGI scope holds the send of the HTTP server."""
_PLACE: Final = re.compile(r"\[\d+\]")
_TOOL: Final = re.compile(r"#/\$defs/(tools\[\d+\]\.function\.parameters)")
MAX_QUOTED = 2000
"""Longest message and field name of an error: they may quote what the client sent."""


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def request_id(scope: Scope) -> str:
    """Return the id of a request: the client's own, or the one that the server gave it."""
    found: str = scope.get(REQUEST_ID_KEY) or ""
    return found


def id_header(scope: Scope) -> dict[str, str]:
    """Return the header that tells the client the request's id; Anthropic's has another name."""
    named = {REQUEST_ID_HEADER: request_id(scope)}
    if is_anthropic(scope["path"]):
        named[ANTHROPIC_ID_HEADER] = request_id(scope)
    return named


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return an error that names its field as the client does.

    Args:
        error: may be about a field.
        names: the client's names of fields, see ``new_name``.
    """
    param, message = error.param or "", error.message
    found = _longest(param, names)
    if found is None:
        return error
    field, name = found
    name += param.removeprefix(field)
    if message.startswith(field):
        message = found[1] + message.removeprefix(field)
    if param == "grammar" and name == "tools" and (part := _TOOL.search(message)):
        # Several tools make one grammar: its definitions are named after the field of each.
        name = new_name(part[1], names)
        message = message.replace(part[0], "#").replace("tools", name, 1)
    return RequestError(message, param=name, status=error.status, code=error.code)


def new_name(field: str, names: Mapping[str, str]) -> str:
    """Return the client's name of a field, or of the way to one.

    Args:
        field: such as ``tools[0].function.name``.
        names: the client's names, by ours. Both may lead into objects and lists, where ``[]`` is
            any place: ``tools[].function``. The longest that fits counts.
    """
    found = _longest(field, names)
    return field if found is None else found[1] + field.removeprefix(found[0])


def _longest(field: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the longest beginning of ``field`` that has another name, and that name."""
    any_place = _PLACE.sub("[]", field)
    fits = [
        key for key in names if any_place == key or any_place.startswith((f"{key}.", f"{key}["))
    ]
    if not fits:
        return None
    key = name = max(fits, key=len)
    name = names[key]
    for place in _PLACE.findall(field):
        key, name = key.replace("[]", place, 1), name.replace("[]", place, 1)
    return None if key == name else (key, name)


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name fields as the client does; see ``renamed``."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, names) from error


def error_body(error: RequestError, path: str = "") -> dict[str, Any]:
    """Return the JSON object for one error, in the form of the protocol of ``path``."""
    message = _printable(error.message)
    if is_anthropic(path):
        return {
            "type": "error",
            "error": {"type": _anthropic_type(error.status), "message": message},
        }
    return {
        "error": {
            "message": message,
            "type": _error_type(error.status),
            "param": None if error.param is None else _printable(error.param),
            "code": error.code,
        }
    }


def error_response(
    error: RequestError, headers: Mapping[str, str] | None = None, *, path: str = ""
) -> JSONResponse:
    """Return the whole response for one error; 429 and 503 say when to come back.

    Args:
        error: what is wrong.
        headers: more of them.
        path: of the request, which decides on the form.
    """
    headers = dict(headers or {})
    if error.status in {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS}:
        headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    return JSONResponse(error_body(error, path), error.status, headers)


def is_anthropic(path: str) -> bool:
    """Return whether a route speaks Anthropic's protocol."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` look the same, unknown routes and crashes included."""

    @app.exception_handler(RequestError)
    async def _refused(request: Request, error: RequestError) -> Response:
        return error_response(error, path=request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: ClientDisconnect) -> Response:  # noqa: ARG001
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody will read it

    @app.exception_handler(ClientGoneError)
    async def _left(request: Request, error: ClientGoneError) -> Response:  # noqa: ARG001
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def _routing(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        message = {
            HTTPStatus.NOT_FOUND: f"unknown route: {where}",
            HTTPStatus.METHOD_NOT_ALLOWED: f"method not allowed: {where}",
        }.get(HTTPStatus(error.status_code), str(error.detail))
        refusal = RequestError(message, status=error.status_code)
        return error_response(refusal, error.headers, path=request.url.path)

    @app.exception_handler(Exception)
    async def _crashed(request: Request, error: Exception) -> Response:
        logger.debug("a request failed: %s", type(error).__qualname__)
        failure = RequestError("internal server error", status=500)
        # Starlette answers a crash outside of all middleware, so the id must be added here.
        return error_response(failure, id_header(request.scope), path=request.url.path)


def _printable(text: str) -> str:
    """Return ``text`` without lone surrogates, and not too long: it may quote what was sent."""
    text = text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def _error_type(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


def _anthropic_type(status: int) -> str:
    """Return Anthropic's name of an HTTP status, as its API reference lists them."""
    return {
        HTTPStatus.UNAUTHORIZED: "authentication_error",
        HTTPStatus.NOT_FOUND: "not_found_error",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
        HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
        HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
        HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    }.get(
        HTTPStatus(status),
        "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error",
    )
