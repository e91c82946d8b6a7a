"""A server with several tokenizer processes: spread, killed, stopped."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server_process import (
    ServerProcess,
    can_bind,
    running_server,
    session_members,
    wait_for,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

THREE = {"num_tokenizers": 3}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    model = tmp_path / "model"
    model.mkdir()
    with running_server(model, tmp_path, server=THREE, silence={"serving": 60}) as server:
        yield server.wait_ready()


def completion(server: ServerProcess, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": len(prompt)}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    found: dict[str, Any] = reply.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def assert_gone(server: ServerProcess) -> None:
    wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}", 5)
    assert can_bind(server.port)


def test_one_that_stands_still_holds_up_its_own_requests_only(server) -> None:
    first = server.children()["tokenizer"]
    os.kill(first, signal.SIGSTOP)
    try:
        with socket.create_connection(("127.0.0.1", server.port), 30) as held:
            body = b'{"prompt": "held up", "max_tokens": 7}'
            held.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            time.sleep(0.5)  # it must be with the first tokenizer before the others are sent
            for number in range(10):
                assert text_of(completion(server, f"number {number}")) == f"number {number}"
            os.kill(first, signal.SIGCONT)
            assert b'"held up"' in b"".join(iter(lambda: held.recv(2**16), b""))
    finally:
        os.kill(first, signal.SIGCONT)


def test_one_that_is_killed_ends_the_server_by_its_name(server) -> None:
    assert text_of(completion(server, "hello")) == "hello"
    os.kill(server.children()["tokenizer-2"], signal.SIGKILL)
    assert server.wait(10) == 7
    assert "error: the tokenizer-2 process (pid " in server.stderr
    assert "Traceback" not in server.stderr
    assert_gone(server)


def test_all_of_them_stop_cleanly(server) -> None:
    assert len(server.children()) == 5
    server.kill(signal.SIGTERM)
    assert server.wait() == 0
    assert "did not stop" not in server.stderr
    assert_gone(server)


def test_they_do_not_outlive_a_killed_server(server) -> None:
    assert len(server.children()) == 5
    server.kill(signal.SIGKILL)
    server.wait()
    wait_for(lambda: not session_members(server.process.pid), "the end of the workers", 5)
