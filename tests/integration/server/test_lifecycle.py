"""Real processes with a fake engine: starting, failing, dying and stopping."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.patience import FOR_EVER, PATIENCE
from support.server_process import (
    ServerProcess,
    can_bind,
    free_port,
    get,
    post,
    running_server,
    session_members,
    wait_for,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LONG = {"prompt": "Tell a story", "max_tokens": 4000, "stream": True}
SLOW = {"delay": FOR_EVER / 4000}
"""Seconds a step that make such an answer outlast every test."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(model, tmp_path, fake=SLOW) as server:
        yield server.wait_ready()


class Stream(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, server: ServerProcess, **fields: object) -> None:
        super().__init__(daemon=True)
        self._url = f"{server.url}/v1/completions"
        self._body = {**LONG, **fields}
        self.text = ""
        self.status: int | None = None
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE) as response:
                self.status = response.status_code
                for text in response.iter_text():
                    self.text += text
                    self.started.set()
        except httpx.TransportError as error:
            self.text += f"[{type(error).__name__}]"
        finally:
            self.started.set()

    def end(self) -> str:
        self.join(PATIENCE)
        assert not self.is_alive(), "the stream is still open"
        return self.text


def streams(server: ServerProcess, count: int) -> list[Stream]:
    opened = [Stream(server) for _ in range(count)]
    for stream in opened:
        assert stream.started.wait(PATIENCE)
    return opened


def assert_gone(server: ServerProcess) -> None:
    wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}")
    assert can_bind(server.port)


def test_sigterm_with_open_streams_stops_everything_cleanly(model, tmp_path) -> None:
    """Public case R113."""
    with running_server(model, tmp_path, fake=SLOW, server={"drain_timeout": 0.5}) as server:
        opened = streams(server.wait_ready(), 8)
        server.kill(signal.SIGTERM)
        assert server.wait() == 0
        assert_gone(server)
        for stream in opened:
            assert "shutting down" in stream.end()
        assert server.events[-1] == "shutdown"


def test_a_drain_lets_short_requests_end_and_refuses_new_ones(model, tmp_path) -> None:
    gate = tmp_path / "gate"
    fake = {"delay": 0.02, "gate": str(gate)}
    with running_server(model, tmp_path, fake=fake, server={"drain_timeout": FOR_EVER}) as server:
        server.wait_ready()
        stream = Stream(server, max_tokens=100)
        assert stream.started.wait(PATIENCE)
        server.kill(signal.SIGTERM)
        # One that comes before the signal is taken in, and waits for the gate like the first.
        completions = f"{server.url}/v1/completions"
        wait_for(
            lambda: httpx.post(completions, json=LONG, timeout=2).status_code == 503,
            "the refusal of a new request",
        )
        gate.touch()
        assert stream.end().endswith("data: [DONE]\n\n")
        assert server.wait() == 0
        assert_gone(server)


def test_an_idle_server_stops_at_ctrl_c_of_the_whole_group(server) -> None:
    """Public case R119: idle; the two below are busy and while starting."""
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait() == 0
    assert "Traceback" not in server.stderr
    assert_gone(server)


def test_a_busy_server_stops_at_ctrl_c_of_the_whole_group(model, tmp_path) -> None:
    """Public case R119."""
    with running_server(model, tmp_path, fake=SLOW, server={"drain_timeout": 0.5}) as server:
        opened = streams(server.wait_ready(), 3)
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 0
        for stream in opened:
            assert "shutting down" in stream.end()
        assert "Traceback" not in server.stderr
        assert_gone(server)


def test_sigterm_to_the_whole_group_is_a_clean_stop(server) -> None:
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert_gone(server)


def test_a_terminal_that_is_closed_stops_the_server_cleanly(server) -> None:
    os.killpg(server.process.pid, signal.SIGHUP)
    assert server.wait() == 0
    assert_gone(server)


def test_a_server_that_shall_outlive_its_terminal_does(model, tmp_path) -> None:
    """As ``nohup`` starts it: with SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running_server(model, tmp_path) as server:
            server.wait_ready()
            os.killpg(server.process.pid, signal.SIGHUP)
            assert post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200
            server.kill(signal.SIGTERM)
            assert server.wait() == 0
            assert "SIGHUP" not in server.stderr
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_that_has_not_come_whole_is_told_of_the_end(server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as half:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
        half.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert half.recv(4096).startswith(b"HTTP/1.1 100"), "the server waits for the body"
        server.kill(signal.SIGTERM)
        answer = b""
        while piece := half.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after" in answer.lower()
    assert server.wait() == 0
    assert "Traceback" not in server.stderr
    assert_gone(server)


def test_ctrl_c_while_starting_stops_at_once(model, tmp_path) -> None:
    """Public case R119."""
    with running_server(model, tmp_path, fake={"startup": FOR_EVER}) as server:
        wait_for(lambda: len(session_members(server.process.pid)) >= 4, "the workers")
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 0
        assert "Traceback" not in server.stderr
        assert_gone(server)


def test_a_second_signal_ends_at_once(model, tmp_path) -> None:
    with running_server(model, tmp_path, fake=SLOW, server={"drain_timeout": FOR_EVER}) as server:
        [stream] = streams(server.wait_ready(), 1)
        server.kill(signal.SIGINT)
        wait_for(lambda: "SIGINT: stopping" in server.stderr, "the first signal")
        server.kill(signal.SIGINT)
        assert "shutting down" in stream.end()
        assert server.wait() == 128 + signal.SIGINT
        assert "Traceback" not in server.stderr
        assert_gone(server)


@pytest.mark.slow
def test_a_worker_that_does_not_stop_is_killed_and_the_exit_code_says_so(model, tmp_path) -> None:
    pool = "minisgl.server.worker_pool"
    constants = {f"{pool}.STOP_TIMEOUT": 1.0, f"{pool}.EXIT_TIMEOUT": 3.0}
    with running_server(model, tmp_path, fake={"deaf": True}, constants=constants) as server:
        server.wait_ready()
        server.kill()
        assert server.wait() == 7
        assert "scheduler process did not stop" in server.stderr
        assert_gone(server)


@pytest.mark.parametrize("victim", ["scheduler", "tokenizer", "detokenizer"])
def test_a_killed_worker_ends_the_server_and_every_open_request(server, victim) -> None:
    """Public case R110."""
    opened = streams(server, 2)
    os.kill(server.children()[victim], signal.SIGKILL)
    for stream in opened:
        assert f"the {victim} process" in stream.end()
    assert server.wait() == 7
    assert f"error: the {victim} process (pid " in server.stderr
    assert "SIGKILL" in server.stderr
    assert "Traceback" not in server.stderr
    assert_gone(server)


def test_workers_do_not_outlive_a_killed_server(server) -> None:
    assert len(server.children()) == 3
    server.kill(signal.SIGKILL)
    server.wait()
    wait_for(lambda: not session_members(server.process.pid), "the end of the workers")


def test_a_port_in_use_is_exit_code_6_and_names_the_port(model, tmp_path) -> None:
    """Public case R115."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running_server(model, tmp_path, port=port) as server:
            assert server.wait() == 6
            assert f"port {port}" in server.stderr
            assert not server.left_over()


def test_a_second_server_on_the_port_of_one_that_still_starts_is_refused(model, tmp_path) -> None:
    first_space, second_space = tmp_path / "1", tmp_path / "2"
    first_space.mkdir()
    second_space.mkdir()
    with running_server(model, first_space, fake={"startup": FOR_EVER}) as first:
        wait_for(lambda: len(session_members(first.process.pid)) >= 4, "the workers")
        with pytest.raises(httpx.ConnectError):
            get(f"{first.url}/health")
        with running_server(model, second_space, port=first.port) as second:
            assert second.wait() == 6
            assert f"port {first.port}" in second.stderr


def test_a_model_that_does_not_exist_is_exit_code_4_and_names_the_path(tmp_path) -> None:
    """Public case R118; a folder without weights and cut ones: tests/faults/test_start.py."""
    missing = tmp_path / "no-such-model"
    with running_server(missing, tmp_path) as server:
        assert server.wait() == 4
        assert str(missing) in server.stderr
        assert "Traceback" not in server.stderr
        assert not server.left_over()


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("load", 4, "error: the file model.safetensors is cut off at byte 17"),
        ("crash", 1, "error: ZeroDivisionError: first line"),
        ("exit", 7, "error: the scheduler process ended with exit code 9 while loading the model"),
    ],
)
def test_a_worker_that_cannot_start_ends_the_server_with_its_cause(
    model, tmp_path, how, code, message
) -> None:
    with running_server(model, tmp_path, fake={"fail": how}) as server:
        assert server.wait() == code
        assert message in server.stderr
        assert server.stdout == ""
        assert_gone(server)


def test_an_unknown_host_is_a_usage_error(model, tmp_path) -> None:
    with running_server(model, tmp_path, server={"host": "no.such.host.invalid"}) as server:
        assert server.wait() == 2
        assert "no.such.host.invalid" in server.stderr


def test_two_servers_live_side_by_side(model, tmp_path) -> None:
    spaces = [tmp_path / "1", tmp_path / "2"]
    for space in spaces:
        space.mkdir()
    with (
        running_server(model, spaces[0]) as one,
        running_server(model, spaces[1]) as other,
    ):
        for server, prompt in ((one.wait_ready(), "one"), (other.wait_ready(), "other")):
            body = {"prompt": prompt, "max_tokens": len(prompt)}
            answer = post(f"{server.url}/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == prompt
        one.kill()
        assert one.wait() == 0
        assert get(f"{other.url}/health").status_code == 200


def test_the_port_is_free_again_at_once_for_the_next_server(model, tmp_path) -> None:
    port = free_port()
    for number in range(2):
        space = tmp_path / str(number)
        space.mkdir()
        with running_server(model, space, port=port) as server:
            server.wait_ready()
            server.kill()
            assert server.wait() == 0


@pytest.mark.slow
def test_a_silent_scheduler_turns_health_red_and_green_again(model, tmp_path) -> None:
    options = {
        "silence": {"serving": FOR_EVER},
        "constants": {"minisgl.server.heartbeat.HEARTBEAT_TIMEOUT": 3.0},
    }
    with running_server(model, tmp_path, **options) as server:
        scheduler = server.wait_ready().children()["scheduler"]
        os.kill(scheduler, signal.SIGSTOP)
        try:
            response = wait_for(
                lambda: (r := get(f"{server.url}/health")).status_code == 503 and r,
                "red health",
            )
            assert "has not answered for" in response.json()["error"]["message"]
        finally:
            os.kill(scheduler, signal.SIGCONT)
        wait_for(lambda: get(f"{server.url}/health").status_code == 200, "green health")


def test_routes_of_a_plugin_that_is_not_there_are_exit_code_3_before_the_model_loads(
    model, tmp_path
) -> None:
    with running_server(
        model, tmp_path, fake={"startup": FOR_EVER}, plugins={"routes": ["no-such-plugin"]}
    ) as server:
        assert server.wait() == 3
        assert "no-such-plugin" in server.stderr


def test_the_key_guards_the_routes_and_its_line_reads_it_from_the_environment(
    model, tmp_path
) -> None:
    with running_server(model, tmp_path, server={"api_key": "secret"}) as server:
        server.wait_ready()
        url = f"{server.url}/v1/models"
        assert get(url).status_code == 401
        assert get(url, headers={"Authorization": "Bearer secret"}).status_code == 200
        assert "$MINISGL_SERVER__API_KEY" in server.stdout
        assert "secret" not in server.stdout + server.stderr
