"""Every HTTP error in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minisgl.errors import RequestError

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5
CLIENT_CLOSED_REQUEST = 499
MAX_QUOTED = 2000
"""Longest message and field name of an error: they may quote what the client sent."""


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the JSON object for one error."""
    return {
        "error": {
            "message": _cut(error.message),
            "type": _error_type(error.status),
            "param": None if error.param is None else _cut(error.param),
            "code": error.code,
        }
    }


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the whole response for one error; 503 says when to come back."""
    headers = dict(headers or {})
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    return JSONResponse(_printable(error_body(error)), error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` look the same, unknown routes and crashes included."""

    @app.exception_handler(RequestError)
    async def _refused(request: Request, error: RequestError) -> Response:  # noqa: ARG001
        return error_response(error)

    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: ClientDisconnect) -> Response:  # noqa: ARG001
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody will read it

    @app.exception_handler(HTTPException)
    async def _routing(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        message = {
            HTTPStatus.NOT_FOUND: f"unknown route: {where}",
            HTTPStatus.METHOD_NOT_ALLOWED: f"method not allowed: {where}",
        }.get(HTTPStatus(error.status_code), str(error.detail))
        return error_response(RequestError(message, status=error.status_code), error.headers)

    @app.exception_handler(Exception)
    async def _crashed(request: Request, error: Exception) -> Response:
        logger.debug("%s %s failed: %r", request.method, request.url.path, error)
        return error_response(RequestError("internal server error", status=500))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def _error_type(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


def _printable(body: dict[str, Any]) -> dict[str, Any]:
    """Return ``body`` without lone surrogates: a message may quote what the client sent."""
    error = {
        key: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for key, value in body["error"].items()
    }
    return {"error": error}
