"""A scheduler that lives and gets nothing done: noticed, told, and ended."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from support.patience import FOR_EVER, PATIENCE
from support.server_process import ServerProcess, can_bind, get, post, running_server, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LIMIT = 5
WATCHDOG = {"watchdog_timeout": LIMIT}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def num_steps(server: ServerProcess) -> int:
    steps: int = get(f"{server.url}/health").json()["num_steps"]
    return steps


def test_a_step_that_does_not_end_ends_the_server_with_a_stack(model: Path, tmp_path: Path) -> None:
    fake = {"first_step": FOR_EVER}
    with running_server(model, tmp_path, fake=fake, server=WATCHDOG) as server:
        pid = server.wait_ready().children()["scheduler"]
        answers: list[httpx.Response] = []

        def ask(*, stream: bool) -> None:
            body = {"prompt": "abc", "max_tokens": 3, "stream": stream}
            answers.append(post(f"{server.url}/v1/completions", json=body))

        clients = [
            threading.Thread(target=ask, kwargs={"stream": stream}) for stream in (False, True)
        ]
        for client in clients:
            client.start()
        assert server.wait() == 7
        for client in clients:
            client.join(PATIENCE)
        what = (
            f"the scheduler process (pid {pid}) has not finished a step for {LIMIT} s "
            "(server.watchdog_timeout)"
        )
        [line] = [line for line in server.stderr.splitlines() if "minisgl: error:" in line]
        assert line == f"minisgl: error: {what}"
        assert [answer.status_code for answer in answers] == [500, 500]
        assert all(what in answer.text for answer in answers)
        assert "_be_busy" in server.stderr, "the stack says where it hangs"
        wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}")
        assert can_bind(server.port)


def test_steps_that_end_and_idleness_are_no_hang(model: Path, tmp_path: Path) -> None:
    # Each step takes a third of the limit, and all together take longer than it.
    fake = {"delay": LIMIT / 3}
    with running_server(model, tmp_path, fake=fake, server=WATCHDOG) as server:
        server.wait_ready()
        body = {"prompt": "abc", "max_tokens": 4}
        answer = post(f"{server.url}/v1/completions", json=body)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        wait_for(lambda: num_steps(server) == 4, "a heartbeat that tells of all steps")
        time.sleep(1.5 * LIMIT)
        assert num_steps(server) == 4
        server.kill(signal.SIGTERM)
        assert server.wait() == 0


def test_what_a_killed_worker_logged_last_is_told(model: Path, tmp_path: Path) -> None:
    with running_server(model, tmp_path) as server:
        pid = server.wait_ready().children()["scheduler"]
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == 7
        told = server.stderr.partition("the last lines of that process:")[2].splitlines()
        assert told[1].startswith("  | ")
        assert told[1].endswith("INFO [scheduler] the fake scheduler serves")
        assert f"the scheduler process (pid {pid}) was killed by SIGKILL" in told[-1]
