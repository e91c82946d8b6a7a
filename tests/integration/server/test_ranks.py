"""A server on two ranks: its answers are those of one, and it ends in seconds when one is lost."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl import LLM, SamplingParams
from support.server_process import ServerProcess, descendants, running_server, wait_for
from support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

PROMPTS = [[(7 * n + 3 * k) % 250 + 5 for k in range(5 + 9 * n)] for n in range(4)]
TIMEOUT = 3


@contextlib.contextmanager
def serving(model: Path, workspace: Path) -> Iterator[ServerProcess]:
    parallel = {"tensor_parallel_size": 2, "timeout": TIMEOUT}
    # 259 tokens are what the light tokenizer of these servers can name.
    with running_server(
        model, workspace, real_engine=True, parallel=parallel, cache={"num_pages": 64}
    ) as server:
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, "the server", 120)
        yield server


def rank_pid(server: ServerProcess) -> int:
    children = descendants(server.children()["scheduler"])
    [pid] = [n for n in children if b"rank_process" in Path(f"/proc/{n}/cmdline").read_bytes()]
    return pid


def ask(server: ServerProcess, prompt: list[int], **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def assert_nothing_left(server: ServerProcess) -> None:
    wait_for(lambda: not server.left_over(), "the end of all processes and files", 5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "qwen3"
    return write_tiny_model(folder, "Qwen3ForCausalLM", vocab_size=259)


def test_answers_equal_those_of_one_rank_and_the_stop_is_clean(tiny: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(str(tiny), progress=False) as llm:
        expected = llm.generate(PROMPTS, params, progress=False)
    with serving(tiny, tmp_path) as server:
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
            assert answer["choices"][0]["text"] == text_of(result.token_ids)
        # A Ctrl-C strikes every process of the group; ranks leave it to the supervisor.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait(30) == 0
        assert "Traceback" not in server.stderr
        assert "did not stop" not in server.stderr
        assert_nothing_left(server)
