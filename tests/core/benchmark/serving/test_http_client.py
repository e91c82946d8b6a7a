"""The load generator's HTTP client against a server that answers given bytes."""

import asyncio

import pytest

from minisgl.benchmark.serving.http_client import Address, ConnectionFailedError, HttpClient
from minisgl.errors import SettingsError
from support.scripted_server import CLOSE, Piece, chunked, scripted_server, whole


async def post(client, body=b"{}"):
    got = bytearray()
    head = await client.post("/completions", body, lambda data, _: got.extend(data))
    return head.status, bytes(got)


def exchange(server, *bodies, together=False):
    async def work():
        client = HttpClient(Address.parse(server.url), {"Authorization": "Bearer key"})
        try:
            if together:
                return await asyncio.gather(*(post(client, body) for body in bodies))
            return [await post(client, body) for body in bodies]
        finally:
            client.close()

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host:81", "http://host:81/v1"),
        ("http://host:81/v1/", "http://host:81/v1"),
        ("host:81", "http://host:81/v1"),
        ("https://host/api", "https://host:443/api/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_an_address_ends_with_the_apis_version(url, address):
    assert str(Address.parse(url)) == address


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host?a"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(SettingsError, match="--base-url"):
        Address.parse(url)


def test_a_request_carries_its_headers_and_its_body():
    with scripted_server(lambda *_: [whole(b"answer")]) as server:
        assert exchange(server, b'{"a": 1}') == [(200, b"answer")]
    first, headers, body = server.requests[0]
    assert first == "POST /v1/completions HTTP/1.1"
    assert headers["authorization"] == "bearer key"
    assert headers["content-type"] == "application/json"
    assert body == b'{"a": 1}'


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_response_may_arrive_in_any_pieces(size):
    data = b"".join(p for p in chunked(b"one", b"two", b"three") if isinstance(p, bytes))
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    with scripted_server(lambda *_: [p for piece in pieces for p in (piece, 0.0005)]) as server:
        assert exchange(server, b"{}") == [(200, b"onetwothree")]


def test_a_connection_is_used_again_and_several_run_at_once():
    def script(number, *_):
        together = [lambda server: len(server.requests) == 6] if number >= 3 else []
        return [*together, *chunked(b"x")]

    with scripted_server(script) as server:
        exchange(server, b"1", b"2", b"3")
        assert server.num_connections == 1
        exchange(server, b"1", b"2", b"3", together=True)
        assert server.num_connections == 4
        assert server.most_open == 3


def test_a_server_that_asks_to_close_gets_a_new_connection():
    with scripted_server(lambda *_: [whole(b"x", "200 OK", "Connection: close"), CLOSE]) as server:
        assert exchange(server, b"1", b"2") == [(200, b"x"), (200, b"x")]
    assert server.num_connections == 2


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced():
    script: list[list[Piece]] = [[whole(b"x")], [CLOSE], [whole(b"y")]]
    with scripted_server(lambda number, *_: script[number]) as server:
        assert exchange(server, b"1", b"2") == [(200, b"x"), (200, b"y")]
    assert server.num_connections == 2


def test_a_body_without_a_length_ends_with_its_connection():
    with scripted_server(lambda *_: [b"HTTP/1.1 200 OK\r\n\r\nsome text", CLOSE]) as server:
        assert exchange(server, b"1") == [(200, b"some text")]


def test_an_interim_response_is_passed_over():
    with scripted_server(lambda *_: [b"HTTP/1.1 100 Continue\r\n\r\n", whole(b"x")]) as server:
        assert exchange(server, b"1") == [(200, b"x")]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([CLOSE], "closed the connection"),
        ([whole(b"0123456789")[:-3], CLOSE], "closed the connection"),
        ([b"SSH-2.0-OpenSSH\r\n"], "no HTTP"),
    ],
)
def test_a_response_that_breaks_off_is_an_error(pieces, message):
    with (
        scripted_server(lambda *_: pieces) as server,
        pytest.raises(ConnectionFailedError, match=message),
    ):
        exchange(server, b"1")


def test_a_server_that_is_not_there_is_an_error():
    with scripted_server(lambda *_: []) as server:
        pass
    with pytest.raises(ConnectionFailedError, match=r"cannot connect to 127\.0\.0\.1"):
        exchange(server, b"1")
