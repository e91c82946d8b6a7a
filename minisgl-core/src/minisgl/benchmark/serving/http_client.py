"""HTTP/1.1 for a load generator: little work a chunk, and the time at which each arrived.

A response's body goes to a callback straight from the socket's protocol: no task wakes up for it,
so that many streams cost the client little. Connections are kept and used again.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from minisgl.errors import MinisglError, SettingsError

OnBody = Callable[[bytes, float], None]
"""Takes a piece of a body and the time of its arrival (``time.perf_counter``)."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class ConnectionFailedError(MinisglError):
    """No connection, or one that broke before the response was complete."""


@dataclass(slots=True)
class Head:
    """What comes before a response's body."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """By name in lower case."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server, and the path below which it has its API.

    Attributes:
        scheme: ``http`` or ``https``.
        path: of the API, such as ``/v1``, without a slash at the end.
    """

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, base_url: str) -> "Address":
        """Return the address of ``http://host:port`` or ``http://host:port/v1``.

        Raises:
            SettingsError: it is no such URL.
        """
        url = base_url if "://" in base_url else f"http://{base_url}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise SettingsError(f"--base-url {base_url!r}: {error}") from error
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.query:
            raise SettingsError(
                f"--base-url must be a server's address, such as http://127.0.0.1:8000, "
                f"got {base_url!r}"
            )
        path = parts.path.rstrip("/")
        if not path.endswith("/v1"):
            path += "/v1"
        return cls(parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme], path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


class _Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._head = Head()
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[Head] | None = None
        self._now = 0.0
        self._is_delimited = False
        self.can_be_reused = False
        self.num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    @property
    def is_open(self) -> bool:
        """Whether the peer has not closed it."""
        return self._transport is not None and not self._transport.is_closing()

    def exchange(self, request: bytes, on_body: OnBody) -> "asyncio.Future[Head]":
        """Send a request; the result is there once the response is complete."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._head, self._on_body = Head(), on_body
        self.can_be_reused = self._is_delimited = False
        self.num_bytes = 0
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.num_bytes += len(data)
        if self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except Exception as error:  # noqa: BLE001  the parser's own, or a callback's
            self._fail(f"the response is no HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        self._head.headers[key] = value.decode("latin-1")
        if key in {"content-length", "transfer-encoding"}:
            self._is_delimited = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._head.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._on_body is not None
        self._on_body(body, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if 100 <= self._head.status < 200:
            return
        self.can_be_reused = self._parser.should_keep_alive()
        self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head.status and not self._is_delimited and exc is None:
            self._finish()  # a body that ends with its connection
        self._fail(f"the connection broke: {exc}" if exc else "the server closed the connection")

    def close(self) -> None:
        """Close it, whatever it carries."""
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._head)

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionFailedError(message))
        self.close()


class HttpClient:
    """Requests to one server, each over a connection of its own while it lasts.

    Args:
        address: of the server.
        headers: sent with every request.
    """

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = {
            "Host": f"{host}:{address.port}",
            "Accept": "text/event-stream, application/json",
            "User-Agent": "minisgl-bench",
            **(headers or {}),
        }
        for name, value in lines.items():
            if not value.isascii() or not value.isprintable():
                raise SettingsError(f"the header {name} holds characters that HTTP does not carry")
        self._common = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, on_body: OnBody) -> Head:
        """Post JSON and return the response's head once all of its body has gone to ``on_body``.

        Raises:
            ConnectionFailedError: there is no connection, or it broke.
        """
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self._send("POST", path, length, body, on_body)

    async def get(self, path: str, on_body: OnBody) -> Head:
        """Like ``post``, without a body."""
        return await self._send("GET", path, "", b"", on_body)

    async def _send(self, method: str, path: str, more: str, body: bytes, on_body: OnBody) -> Head:
        target = f"{self._address.path}{path}"
        request = f"{method} {target} HTTP/1.1\r\n{self._common}{more}\r\n".encode("ascii") + body
        while True:
            connection, is_fresh = await self._connect()
            try:
                head = await connection.exchange(request, on_body)
            except ConnectionFailedError:
                # A server may close a kept connection just when it is used again.
                if is_fresh or connection.num_bytes:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            if connection.can_be_reused:
                self._idle.append(connection)
            else:
                connection.close()
            return head

    async def _connect(self) -> tuple[_Connection, bool]:
        """Return a connection, and whether it is a new one."""
        while self._idle:
            kept = self._idle.pop()
            if kept.is_open:
                return kept, False
        address = self._address
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, address.host, address.port, ssl=self._ssl
            )
        except OSError as error:
            raise ConnectionFailedError(
                f"cannot connect to {address.host}:{address.port}: {_reason(error)}"
            ) from error
        return connection, True

    def close(self) -> None:
        """Close the connections that are kept."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
