"""A server on two ranks: its answers are those of one, and it ends in seconds when one is lost."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl import LLM, SamplingParams
from support.patience import FOR_EVER, PATIENCE
from support.server_process import (
    ServerProcess,
    descendants,
    get,
    post,
    running_server,
    wait_for,
)
from support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

PROMPTS = [[(7 * n + 3 * k) % 250 + 5 for k in range(5 + 9 * n)] for n in range(4)]
TIMEOUT = 5
"""Seconds after which a rank that is stopped counts as lost."""


@contextlib.contextmanager
def serving(
    model: Path, workspace: Path, *, tp: int = 2, timeout: float = FOR_EVER, **options: Any
) -> Iterator[ServerProcess]:
    options["parallel"] = {"tensor_parallel_size": tp, "timeout": timeout}
    with running_server(
        model, workspace, real_engine=True, cache={"num_pages": 64}, **options
    ) as server:
        server.wait_ready()
        yield server


def rank_pid(server: ServerProcess) -> int:
    children = descendants(server.children()["scheduler"])
    [pid] = [n for n in children if b"rank_process" in Path(f"/proc/{n}/cmdline").read_bytes()]
    return pid


def ask(server: ServerProcess, prompt: list[int], **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, **fields}
    return post(f"{server.url}/v1/completions", json=body)


def assert_nothing_left(server: ServerProcess) -> None:
    wait_for(lambda: not server.left_over(), "the end of all processes and files")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The light tokenizer of these servers can name 259 tokens."""
    folder = tmp_path_factory.mktemp("tiny") / "qwen3"
    return write_tiny_model(folder, "Qwen3ForCausalLM", vocab_size=259)


def test_answers_equal_those_of_one_rank_and_the_stop_is_clean(tiny: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(str(tiny), progress=False) as llm:
        expected = llm.generate(PROMPTS, params, progress=False)
    with serving(tiny, tmp_path, real_text=True) as server:
        answers: dict[int, httpx.Response] = {}

        def work(n: int) -> None:
            answers[n] = ask(server, PROMPTS[n])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, result in enumerate(expected):
            answer = answers[n].json()
            assert answer["choices"][0]["finish_reason"] == result.finish_reason
            assert answer["usage"]["completion_tokens"] == len(result.token_ids)
            assert answer["choices"][0]["text"] == result.text
        # A Ctrl-C strikes every process of the group; ranks leave it to the supervisor.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 0
        assert "Traceback" not in server.stderr
        assert "did not stop" not in server.stderr
        assert_nothing_left(server)


def test_four_ranks_answer_as_one_does(tmp_path: Path) -> None:
    """Two ranks share a KV head, one layer has a window; other models: test_tensor_parallel."""
    model = write_tiny_model(tmp_path / "model", "Qwen2ForCausalLM", vocab_size=259)
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(str(model), progress=False) as llm:
        expected = llm.generate(PROMPTS, params, progress=False)
    with serving(model, tmp_path, tp=4, real_text=True) as server:
        answers = [ask(server, prompt).json() for prompt in PROMPTS]
    for answer, result in zip(answers, expected, strict=True):
        assert answer["usage"]["completion_tokens"] == len(result.token_ids)
        assert answer["choices"][0]["text"] == result.text


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "generating"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_the_server_and_every_open_request(
    tiny: Path, tmp_path: Path, number: signal.Signals, busy: bool
) -> None:
    timeout = TIMEOUT if number is signal.SIGSTOP else FOR_EVER
    with serving(tiny, tmp_path, timeout=timeout) as server:
        pid = rank_pid(server)
        answers: list[httpx.Response] = []

        def generate() -> None:
            # Each request goes on to the end of the context, and the next one follows.
            while not answers or answers[-1].status_code == 200:
                answers.append(ask(server, [5, 6, 7], max_tokens=400, ignore_eos=True))

        client = threading.Thread(target=generate)
        if busy:
            client.start()
            wait_for(lambda: get(f"{server.url}/health").json()["num_running"], "a request")
        os.kill(pid, number)
        assert server.wait() == 7
        [line] = [line for line in server.stderr.splitlines() if "error:" in line]
        assert "the scheduler process (pid " in line
        assert "ended with exit code 7" in line
        assert f"rank 1 (pid {pid}) " in line
        if number is signal.SIGKILL:
            assert "was killed by SIGKILL" in line
        else:
            limit = f"for {TIMEOUT} s (parallel.timeout)"
            assert (limit if busy else f"has shown no sign of life {limit}") in line
        assert "Traceback" not in server.stderr
        assert_nothing_left(server)
        if busy:
            client.join(PATIENCE)
            assert answers[-1].status_code == 500
            assert f"rank 1 (pid {pid})" in answers[-1].json()["error"]["message"]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "generating"])
def test_a_stopped_rank_0_ends_the_server_and_the_other_rank(
    tiny: Path, tmp_path: Path, busy: bool
) -> None:
    with serving(tiny, tmp_path, timeout=TIMEOUT, silence={"serving": TIMEOUT}) as server:
        pid = server.children()["scheduler"]
        answers: list[httpx.Response] = []

        def generate() -> None:
            while not answers or answers[-1].status_code == 200:
                answers.append(ask(server, [5, 6, 7], max_tokens=400, ignore_eos=True))

        client = threading.Thread(target=generate)
        if busy:
            client.start()
            wait_for(lambda: get(f"{server.url}/health").json()["num_running"], "a request")
        os.kill(pid, signal.SIGSTOP)
        assert server.wait() == 7
        what = f"the scheduler process (pid {pid}) has shown no sign of life for {TIMEOUT} s"
        [line] = [line for line in server.stderr.splitlines() if "error:" in line]
        assert line.endswith(what)
        assert "Traceback" not in server.stderr
        assert_nothing_left(server)
        if busy:
            client.join(PATIENCE)
            assert answers[-1].status_code == 500
            assert what in answers[-1].json()["error"]["message"]
