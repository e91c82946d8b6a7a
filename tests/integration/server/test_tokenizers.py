"""A server with several tokenizer processes: spread, killed, stopped."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.patience import FOR_EVER, PATIENCE
from support.server_process import (
    ServerProcess,
    can_bind,
    post,
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
    with running_server(model, tmp_path, server=THREE, silence={"serving": FOR_EVER}) as server:
        yield server.wait_ready()


def completion(server: ServerProcess, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": len(prompt)}
    reply = post(f"{server.url}/v1/completions", json=body)
    found: dict[str, Any] = reply.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def assert_gone(server: ServerProcess) -> None:
    wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}")
    assert can_bind(server.port)


def test_one_that_stands_still_holds_up_its_own_requests_only(server) -> None:
    first = server.children()["tokenizer"]
    answers: dict[str, str] = {}

    def ask(prompt: str) -> None:
        answers[prompt] = text_of(completion(server, prompt))

    # The first of them that comes is held up; the other one goes past.
    pair = [threading.Thread(target=ask, args=(prompt,), daemon=True) for prompt in ("one", "two")]
    os.kill(first, signal.SIGSTOP)
    try:
        for thread in pair:
            thread.start()
        wait_for(lambda: answers, "the request that went past")
        for number in range(10):
            assert text_of(completion(server, f"number {number}")) == f"number {number}"
        assert len(answers) == 1
    finally:
        os.kill(first, signal.SIGCONT)
    for thread in pair:
        thread.join(PATIENCE)
    assert answers == {"one": "one", "two": "two"}


def test_one_that_is_killed_ends_the_server_by_its_name(server) -> None:
    assert text_of(completion(server, "hello")) == "hello"
    os.kill(server.children()["tokenizer-2"], signal.SIGKILL)
    assert server.wait() == 7
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
    wait_for(lambda: not session_members(server.process.pid), "the end of the workers")
