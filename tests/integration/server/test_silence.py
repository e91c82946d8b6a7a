"""Worker processes that are stopped or frozen, and others that only look as if they were."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
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

LIMIT = 6
"""Seconds: no living worker may be kept from every sign of life for so long, on any machine."""
START_LIMIT = 10
"""The same while it imports."""
LONGER = LIMIT + 3
SLOW = {"delay": FOR_EVER / 4000}
"""Seconds a step that make a long answer outlast every test."""
WORKERS = ("scheduler", "tokenizer", "detokenizer")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


class Client(threading.Thread):
    """Sends one long request; ``answer`` is all that came back."""

    def __init__(self, server: ServerProcess, *, stream: bool) -> None:
        super().__init__(daemon=True)
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": "Tell a story", "max_tokens": 4000, "stream": stream}
        self.began = threading.Event()
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE) as response:
            self.began.set()
            response.read()
        self.answer = response

    def end(self) -> httpx.Response:
        self.join(PATIENCE)
        assert self.answer is not None, "the request got no answer"
        return self.answer


def error_lines(server: ServerProcess) -> list[str]:
    return [line for line in server.stderr.splitlines() if "error:" in line]


def assert_gone(server: ServerProcess) -> None:
    wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}")
    assert can_bind(server.port)
    assert "Traceback" not in server.stderr


def num_accepted(server: ServerProcess) -> int:
    return sum(event.startswith("generate") for event in server.events)


def test_a_stopped_worker_ends_the_server_and_every_open_request(model, tmp_path) -> None:
    """A server for each worker, all at once: most of the time they wait."""
    with ThreadPoolExecutor(len(WORKERS)) as threads:
        assert list(threads.map(partial(stop_worker, model, tmp_path), WORKERS)) == list(WORKERS)


def stop_worker(model: Path, tmp_path: Path, victim: str) -> str:
    space = tmp_path / victim
    space.mkdir()
    with running_server(model, space, fake=SLOW, silence={"serving": LIMIT}) as server:
        server.wait_ready()
        clients = [Client(server, stream=stream) for stream in (True, False)]
        wait_for(lambda: num_accepted(server) == 2, "both requests")
        assert clients[0].began.wait(PATIENCE), "the stream has its status line by its first token"
        pid = server.children()[victim]
        os.kill(pid, signal.SIGSTOP)
        streamed, plain = [client.end() for client in clients]
        assert server.wait() == 7
        what = f"the {victim} process (pid {pid}) has shown no sign of life for {LIMIT} s"
        assert error_lines(server) == [f"minisgl: error: {what}"]
        assert streamed.status_code == 200
        assert what in streamed.text.split("data: ")[-1]
        assert plain.status_code == 500
        assert what in plain.json()["error"]["message"]
        assert_gone(server)
    return victim


def test_an_idle_server_notices_too(model, tmp_path) -> None:
    with running_server(model, tmp_path, silence={"serving": LIMIT}) as server:
        pid = server.wait_ready().children()["scheduler"]
        os.kill(pid, signal.SIGSTOP)
        assert server.wait() == 7
        assert f"the scheduler process (pid {pid}) has shown no sign of life" in server.stderr
        assert_gone(server)


def test_a_worker_that_is_stopped_while_it_starts_ends_the_start(model, tmp_path) -> None:
    with running_server(
        model, tmp_path, fake={"startup": FOR_EVER}, silence={"starting": START_LIMIT}
    ) as server:
        # The server, its workers, and the tracker of multiprocessing's resources.
        wait_for(lambda: len(session_members(server.process.pid)) == 5, "the workers")
        pid = server.children()["scheduler"]
        os.kill(pid, signal.SIGSTOP)
        assert server.wait() == 7
        [line] = error_lines(server)
        what = f"the scheduler process (pid {pid}) has shown no sign of life for {START_LIMIT} s"
        assert f"{what} while " in line
        assert_gone(server)


@pytest.mark.parametrize("busy", [pytest.param("asleep", marks=pytest.mark.slow), "computing"])
def test_a_step_longer_than_the_limit_is_no_silence(model, tmp_path, busy) -> None:
    fake = {"first_step": LONGER, "computing": busy == "computing"}
    with running_server(model, tmp_path, fake=fake, silence={"serving": LIMIT}) as server:
        server.wait_ready()
        body = {"prompt": "abc", "max_tokens": 3}
        began = time.monotonic()
        answer = post(f"{server.url}/v1/completions", json=body)
        assert time.monotonic() - began > LIMIT + 1  # or the step was no test
        assert answer.json()["choices"][0]["text"] == "abc"
        server.kill()
        assert server.wait() == 0
        assert_gone(server)


def test_a_server_that_was_suspended_itself_takes_nobody_for_dead(model, tmp_path) -> None:
    with running_server(model, tmp_path, silence={"serving": LIMIT}) as server:
        server.wait_ready()
        os.killpg(server.process.pid, signal.SIGSTOP)
        time.sleep(LONGER)
        # It wakes before its workers do: what it sees first is the old silence.
        server.kill(signal.SIGCONT)
        time.sleep(0.5)
        os.killpg(server.process.pid, signal.SIGCONT)
        body = {"prompt": "abc", "max_tokens": 3}
        answer = post(f"{server.url}/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "abc"
        server.kill()
        assert server.wait() == 0
        assert_gone(server)


@pytest.mark.slow
def test_a_stopped_worker_does_not_outlast_a_drain(model, tmp_path) -> None:
    with running_server(
        model,
        tmp_path,
        fake=SLOW,
        silence={"serving": LIMIT},
        server={"drain_timeout": FOR_EVER},
    ) as server:
        server.wait_ready()
        client = Client(server, stream=True)
        wait_for(lambda: num_accepted(server) == 1, "the request")
        os.kill(server.children()["scheduler"], signal.SIGSTOP)
        server.kill()
        assert "no sign of life" in client.end().text
        assert server.wait() == 7
        assert_gone(server)
