"""What one connection may do to the server, over real sockets; HTTPS."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from minisgl.errors import SettingsError
from minisgl.server import http_server
from minisgl.server.http_server import MAX_HEAD_BYTES, build_http_server, tls_context
from minisgl.server.listen_socket import bind_socket, listen
from minisgl.settings import ServerSettings
from support.patience import PATIENCE

GET = b"GET / HTTP/1.1\r\nHost: here\r\n"
PASSWORD = "open sesame"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def run(scenario: Callable[[int], Awaitable[Any]], app: Any = echo, **settings: Any) -> Any:
    """Return what ``scenario`` does, given the port of a running server."""

    async def main() -> Any:
        bound = bind_socket("127.0.0.1", 0)
        port = bound.getsockname()[1]
        server = build_http_server(app, ServerSettings(**settings))
        listen(bound, "127.0.0.1", port)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            return await asyncio.wait_for(scenario(port), PATIENCE)
        finally:
            server.should_exit = True
            await serving
            bound.close()

    return asyncio.run(main())


async def exchange(port: int, *parts: bytes) -> bytes:
    """Send ``parts`` and return all that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()
    finally:
        writer.close()


def parsed(answer: bytes) -> tuple[int, str, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), json.loads(body)["error"]


async def still_serves(port: int) -> bool:
    answer = await exchange(port, GET + b"Connection: close\r\n\r\n")
    return answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n0")


@pytest.mark.parametrize("kind", ["one", "many", "url"])
def test_endless_headers_are_a_431_and_the_connection_ends(kind: str) -> None:
    line = b"X-%d: y\r\n"
    parts = {
        "one": [GET, b"X-Long: " + b"y" * MAX_HEAD_BYTES, b"\r\n\r\n"],
        "many": [GET, *(line % number for number in range(MAX_HEAD_BYTES // 4)), b"\r\n"],
        "url": [b"GET /" + b"y" * MAX_HEAD_BYTES, b" HTTP/1.1\r\nHost: here\r\n\r\n"],
    }

    async def scenario(port: int) -> tuple[bytes, bool]:
        try:
            answer = await exchange(port, *parts[kind])
        except ConnectionError:  # it was closed while we were still talking
            answer = b""
        return answer, await still_serves(port)

    answer, serves = run(scenario)
    assert serves
    if answer:
        status, _, error = parsed(answer)
        assert (status, error["code"]) == (431, "headers_too_large")
        assert str(MAX_HEAD_BYTES) in error["message"]


def test_requests_that_follow_one_another_without_waiting_are_no_endless_head() -> None:
    """Many of them come in one piece, which ends anywhere."""
    post = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 3\r\n\r\nabc"
    number = 8 * MAX_HEAD_BYTES // len(post)

    async def scenario(port: int) -> bytes:
        return await exchange(port, post * number + GET + b"Connection: close\r\n\r\n")

    answers = run(scenario)
    assert answers.count(b"HTTP/1.1 200 OK") == number + 1
    assert b"431" not in answers


def test_what_is_no_http_never_stands_in_the_middle_of_an_answer() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        begun.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"last"})

    async def scenario(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        await begun.wait()
        writer.write(b"this is no request\r\n\r\n")
        answer = await reader.read()
        go_on.set()
        writer.close()
        return answer

    answer = run(scenario, app=slow)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"first\r\n"), "it ends where the connection was closed"


def test_large_headers_within_the_limit_pass_again_and_again() -> None:
    async def scenario(port: int) -> list[int]:
        headers = {"X-Long": "y" * (MAX_HEAD_BYTES * 3 // 4)}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:
            return [(await http.get("/", headers=headers)).status_code for _ in range(3)]

    assert run(scenario) == [200] * 3


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET, GET + b"\r\n" + GET])
def test_a_client_that_never_sends_its_request_is_let_go(sent: bytes, monkeypatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.5)  # a slow machine has read it by then

    async def scenario(port: int) -> tuple[bytes, bool]:
        return await exchange(port, sent), await still_serves(port)

    answer, serves = run(scenario)
    status, head, error = parsed(answer[answer.rindex(b"HTTP/1.1") :])
    assert (status, error["code"]) == (408, "request_timeout")
    assert "connection: close" in head
    assert serves


def test_a_connection_too_many_is_a_503_until_another_one_ends() -> None:
    async def scenario(port: int) -> tuple[bytes, bool]:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in opened:  # both are known to the server once it has answered
            writer.write(GET + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
        refused = await exchange(port, b"")
        opened[0][1].close()
        while not (serves := await still_serves_or_refused(port)):
            await asyncio.sleep(0.01)
        opened[1][1].close()
        return refused, serves

    async def still_serves_or_refused(port: int) -> bool:
        try:
            return await still_serves(port)
        except ConnectionError:
            return False

    refused, serves = run(scenario, max_connections=2)
    status, head, error = parsed(refused)
    assert (status, error["code"]) == (503, "too_many_connections")
    assert "retry-after: " in head
    assert "2 connections" in error["message"]
    assert serves


def test_what_is_no_http_is_a_400_in_json() -> None:
    async def scenario(port: int) -> tuple[bytes, bool]:
        return await exchange(port, b"\x16\x03\x01 hello\r\n\r\n"), await still_serves(port)

    answer, serves = run(scenario)
    assert parsed(answer)[0] == 400
    assert serves


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory) -> dict[str, Path]:
    """A certificate of 127.0.0.1: chain, key, key with a password, both in one file; the CA."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1")
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(PASSWORD.encode())
    )
    found = {name: folder / f"{name}.pem" for name in ("chain", "key", "locked", "both", "ca")}
    found["chain"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(found["key"]))
    found["locked"].write_bytes(locked)
    issued.private_key_and_cert_chain_pem.write_to_path(str(found["both"]))
    authority.cert_pem.write_to_path(str(found["ca"]))
    return found


def client_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.mark.parametrize(
    "given",
    [
        {"ssl_certfile": "both"},
        {"ssl_certfile": "chain", "ssl_keyfile": "key"},
        {"ssl_certfile": "chain", "ssl_keyfile": "locked", "ssl_keyfile_password": PASSWORD},
    ],
)
def test_https(given: dict[str, str], files: dict[str, Path], authority: trustme.CA) -> None:
    async def scenario(port: int) -> tuple[str, bytes]:
        async with httpx.AsyncClient(verify=client_context(authority), timeout=PATIENCE) as http:
            answered = await http.post(f"https://127.0.0.1:{port}/", content=b"four")
        try:
            plain = await exchange(port, GET + b"\r\n")
        except ConnectionError:
            plain = b""
        return answered.text, plain

    settings = {name: files.get(value, value) for name, value in given.items()}
    text, plain = run(scenario, **settings)
    assert text == "4"
    assert not plain.startswith(b"HTTP/1.1 200")


def test_clients_must_show_a_certificate_if_authorities_are_named(
    files: dict[str, Path], authority: trustme.CA
) -> None:
    async def scenario(port: int) -> tuple[bool, int]:
        bare, signed = client_context(authority), client_context(authority)
        authority.issue_cert("me@example.org").configure_cert(signed)
        async with httpx.AsyncClient(verify=bare, timeout=PATIENCE) as http:
            try:
                await http.get(f"https://127.0.0.1:{port}/")
                refused = False
            except httpx.TransportError:
                refused = True
        async with httpx.AsyncClient(verify=signed, timeout=PATIENCE) as http:
            return refused, (await http.get(f"https://127.0.0.1:{port}/")).status_code

    settings = {"ssl_certfile": files["both"], "ssl_ca_certs": files["ca"]}
    assert run(scenario, **settings) == (True, 200)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"ssl_keyfile": "key"}, "ssl_keyfile is given without server.ssl_certfile"),
        ({"ssl_ca_certs": "ca"}, "ssl_ca_certs is given without server.ssl_certfile"),
        ({"ssl_certfile": "/no/such/file"}, "server.ssl_certfile='/no/such/file' is no file"),
        (
            {"ssl_certfile": "both", "ssl_ca_certs": "/no/such/file"},
            "server.ssl_ca_certs='/no/such/file' is no file",
        ),
        ({"ssl_certfile": "chain"}, "cannot be used"),
        ({"ssl_certfile": "key"}, "cannot be used"),
        ({"ssl_certfile": "chain", "ssl_keyfile": "locked"}, "ssl_keyfile_password"),
        (
            {"ssl_certfile": "chain", "ssl_keyfile": "locked", "ssl_keyfile_password": "wrong"},
            "ssl_keyfile_password",
        ),
    ],
)
def test_certificates_that_cannot_be_used_are_refused_at_the_start(
    given: dict[str, str], complaint: str, files: dict[str, Path]
) -> None:
    settings = ServerSettings(**{name: files.get(value, value) for name, value in given.items()})
    with pytest.raises(SettingsError) as caught:
        tls_context(settings)
    assert complaint in str(caught.value)
    assert "wrong" not in str(caught.value)
