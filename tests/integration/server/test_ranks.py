"""A server on two ranks: its answers are those of one, and it ends in seconds when one is lost."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl import LLM, SamplingParams
from support.server_process import descendants, free_port, session_members, wait_for
from support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

PROMPTS = [[(7 * n + 3 * k) % 250 + 5 for k in range(5 + 9 * n)] for n in range(4)]
TIMEOUT = 3


class TwoRankServer:
    """``minisgl serve --tp 2``, its output in a file, its sockets in a folder of its own."""

    def __init__(self, model: Path, log: Path) -> None:
        self.log = log
        self.temporary = Path(tempfile.mkdtemp(prefix="ranks"))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--model", str(model), "--port", str(port), "--tp", "2", "--num-pages", "64"]
        flags += ["--set", f"parallel.timeout={TIMEOUT}"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minisgl", "serve", *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return httpx.get(f"{self.url}/health").status_code == 200

        wait_for(ready, "the server", seconds=120)

    def rank_pid(self) -> int:
        [pid] = [
            grandchild
            for child in descendants(self.process.pid)
            for grandchild in descendants(child)
            if b"rank_process" in Path(f"/proc/{grandchild}/cmdline").read_bytes()
        ]
        return pid

    def ask(self, prompt: list[int], **fields: object) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def assert_nothing_left(self) -> None:
        wait_for(lambda: not session_members(self.process.pid), "the end of all processes", 5)
        assert list(self.temporary.iterdir()) == []


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[TwoRankServer]:
    server = TwoRankServer(model, log)
    try:
        server.wait_ready()
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        with contextlib.suppress(OSError):
            server.temporary.rmdir()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")


def test_answers_equal_those_of_one_rank_and_the_stop_is_clean(tiny: Path, tmp_path: Path) -> None:
    with LLM(str(tiny), progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        expected = [result.text for result in llm.generate(PROMPTS, params, progress=False)]
    with serving(tiny, tmp_path / "log") as server:
        texts = [""] * len(PROMPTS)

        def work(n: int) -> None:
            texts[n] = server.ask(PROMPTS[n]).json()["choices"][0]["text"]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == expected
        # A Ctrl-C strikes every process of the group; ranks leave it to the supervisor.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(30) == 0
        output = server.log.read_text()
        assert "Traceback" not in output
        assert "did not stop" not in output
        server.assert_nothing_left()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "generating"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_server_and_every_open_request(
    tiny: Path, tmp_path: Path, number: signal.Signals, busy: bool
) -> None:
    with serving(tiny, tmp_path / "log") as server:
        pid = server.rank_pid()
        answers: list[httpx.Response] = []

        def generate() -> None:
            # Each request goes on to the end of the context, and the next one follows.
            while not answers or answers[-1].status_code == 200:
                answers.append(server.ask([5, 6, 7], max_tokens=400, ignore_eos=True))

        client = threading.Thread(target=generate)
        if busy:
            client.start()
            wait_for(lambda: httpx.get(f"{server.url}/health").json()["num_running"], "a request")
        os.kill(pid, number)
        assert server.process.wait(TIMEOUT + 20) == 7
        output = server.log.read_text()
        [line] = [line for line in output.splitlines() if "error:" in line]
        assert "the scheduler process (pid " in line
        assert "ended with exit code 7" in line
        assert f"rank 1 (pid {pid}) " in line
        if number is signal.SIGKILL:
            assert "was killed by SIGKILL" in line
        else:
            assert ("for 3 s" if busy else "no sign of life for 3.") in line
        assert "Traceback" not in output
        server.assert_nothing_left()
        if busy:
            client.join(10)
            assert answers[-1].status_code == 500
            assert f"rank 1 (pid {pid})" in answers[-1].json()["error"]["message"]
