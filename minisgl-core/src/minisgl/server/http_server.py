"""The HTTP server itself: uvicorn with limits on what a connection may take, and TLS."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.errors import RequestError, SettingsError, without_messages
from minisgl.server.errors import RETRY_AFTER_SECONDS, error_body
from minisgl.settings import ServerSettings

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 64 * 1024
"""Most bytes of a request's line and headers; further ones get 431."""

HEAD_TIMEOUT_S: Final = 30.0
"""Seconds that they may take to come."""

CLOSE_TIMEOUT_S: Final = 2
"""Seconds that responses get to end once their requests have."""

KEEP_ALIVE_TIMEOUT_S: Final = 60
"""Seconds that an idle connection stays open for its client's next request."""


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the supervisor decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def build_http_server(app: Any, settings: ServerSettings) -> HttpServer:
    """Return a server for ``app``; it does not listen yet.

    Args:
        app: the ASGI application.
        settings: limits and certificates.

    Raises:
        SettingsError: a certificate or key cannot be used.
    """
    context = tls_context(settings)
    config = uvicorn.Config(
        app,
        http=_limited(settings.max_connections),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    config.load()
    config.ssl = context
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return HttpServer(config)


def _is_news(record: logging.LogRecord) -> bool:
    """Drop what the server's end says of connections that it cuts, and messages of crashes."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and without_messages(record)


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return what HTTPS needs, or ``None`` if the server speaks plain HTTP.

    Raises:
        SettingsError: a file cannot be read, does not fit the others, or one is missing.
    """
    given = {
        name: value
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
        if (value := getattr(settings, name)) is not None
    }
    if settings.ssl_certfile is None:
        if given:
            raise SettingsError(
                f"server.{next(iter(given))} is given without server.ssl_certfile; type "
                "--ssl-certfile FILE"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    password = settings.ssl_keyfile_password
    # Without a function OpenSSL would ask on the terminal.
    secret = "" if password is None else password.get_secret_value()
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, lambda: secret)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise SettingsError(_tls_complaint(settings, error)) from error
    return context


def _tls_complaint(settings: ServerSettings, error: Exception) -> str:
    """Return which of the files is at fault, as far as that can be told."""
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path: Path | None = getattr(settings, name)
        if path is not None and not path.is_file():
            return f"server.{name}={str(path)!r} is no file"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return (
        f"server.ssl_certfile={str(settings.ssl_certfile)!r} cannot be used: {reason}; it must be "
        "a PEM chain, its key in the same file or in server.ssl_keyfile, and "
        "server.ssl_keyfile_password the key's password"
    )


def _limited(max_connections: int) -> type[HttpToolsProtocol]:
    """Return the protocol of a server with so many connections at most."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"max_connections": max_connections})


class _LimitedProtocol(HttpToolsProtocol):
    """One connection, whose client may neither send endless headers nor none at all."""

    max_connections: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._in_head = True
        self._has_got_on = False
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the server has {self.max_connections} connections already "
                "(server.max_connections); try again later",
                "too_many_connections",
            )
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unfinished_bytes += len(data)
        self._has_got_on = False
        super().data_received(data)
        # What came may have ended one head and begun another, of which it holds less than all.
        if self._has_got_on or not self._in_head:
            self._unfinished_bytes = 0
        elif self._unfinished_bytes > MAX_HEAD_BYTES:  # the parser keeps a line until it is whole
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._in_head = True
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        self._has_got_on = True
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg, None)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request's line and headers are larger than {MAX_HEAD_BYTES} bytes",
            "headers_too_large",
        )

    def _head_is_late(self) -> None:
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT,
            f"no complete request came within {HEAD_TIMEOUT_S:g} s",
            "request_timeout",
        )

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: HTTPStatus, message: str, code: str | None) -> None:
        """Answer, once, and close the connection; what else comes over it is not read.

        Where an answer has begun, nothing may stand in its middle: the connection just ends.
        """
        if self._refused:
            return
        self._refused = True
        self._stop_timer()
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
            return
        body = msgspec.json.encode(
            error_body(RequestError(message, status=status.value, code=code))
        )
        retry = (
            f"retry-after: {RETRY_AFTER_SECONDS}\r\n"
            if status is HTTPStatus.SERVICE_UNAVAILABLE
            else ""
        )
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
