"""The whole server: real processes, a real (tiny) model, and the demo model's answer."""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl import LLM, SamplingParams
from support.server_process import get, post, serving, wait_for
from support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the supervisor's tests need Linux"),
]

NUM_PAGES = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def url(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    flags = ("--num-pages", str(NUM_PAGES), "--page-size", "8", "--max-prefill-tokens", "32")
    with serving(str(tiny), log, *flags) as address:
        yield address


def ask(url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, **fields}
    response = post(f"{url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def wait_idle(url: str) -> None:
    """Every page comes back: free, or in the prefix cache where it can be evicted."""

    def idle() -> bool:
        load = get(f"{url}/health").json()
        return load["num_running"] == load["num_waiting"] == 0 and (
            load["num_free_pages"] == load["num_pages"] == NUM_PAGES
        )

    wait_for(idle, "all pages to be free")


def test_answers_equal_those_of_the_offline_llm_under_load_and_page_pressure(
    url: str, tiny: Path
) -> None:
    prompts = [[(7 * n + 3 * k) % 250 + 5 for k in range(5 + 9 * n)] for n in range(16)]
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(str(tiny), progress=False) as llm:
        expected = llm.generate(prompts, params, progress=False)
    answers: dict[int, dict[str, Any]] = {}

    def work(n: int) -> None:
        answers[n] = ask(url, prompts[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, result in enumerate(expected):
        choice, usage = answers[n]["choices"][0], answers[n]["usage"]
        assert choice["text"] == result.text
        assert choice["finish_reason"] == result.finish_reason
        assert usage["completion_tokens"] == len(result.token_ids)
        assert usage["prompt_tokens"] == len(prompts[n])
    wait_idle(url)


def test_a_stream_equals_the_whole_answer_and_its_usage(url: str) -> None:
    prompt = [11, 12, 13, 14]
    whole = ask(url, prompt)
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = post(f"{url}/v1/completions", json=body).text
    blocks = text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
    pieces = [event["choices"][0]["text"] for event in events if event["choices"]]
    assert "".join(pieces) == whole["choices"][0]["text"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_hang_up_leave_no_page_behind(url: str, stream: bool) -> None:
    body = {"prompt": [9, 8, 7], "max_tokens": 400, "ignore_eos": True, "stream": stream}
    for _ in range(10):
        with (
            contextlib.suppress(httpx.TimeoutException),
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=0.2) as response,
        ):
            next(response.iter_bytes(), None)
    wait_idle(url)
    assert ask(url, [9, 8, 7])["usage"]["completion_tokens"] <= 20


def test_limits_are_refused_with_their_numbers_and_the_next_request_is_served(url: str) -> None:
    limit = NUM_PAGES * 8 + 1
    for body, words in (
        ({"prompt": [5] * limit}, [f"{limit} tokens", f"at most {limit - 1}"]),
        ({"prompt": [5], "max_tokens": 10**6}, ["1000000", f"room for {limit - 1}"]),
        ({"prompt": [5, 10**6]}, ["1000000", "from 0 to 262"]),
    ):
        response = post(f"{url}/v1/completions", json=body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert all(word in message for word in words), message
    assert ask(url, [5, 6])["choices"]
