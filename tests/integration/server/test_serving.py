"""One real server, its text workers real and its engine faked, as clients see it."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from support.patience import PATIENCE
from support.server_process import ServerProcess, post, running_server, wait_for
from support.text_tokenizers import write_byte_level

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CHAT = {"messages": [{"role": "user", "content": "hello 😀 wörld"}]}
LONG = {"prompt": "Tell a story", "max_tokens": 4000, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    workspace = tmp_path_factory.mktemp("server")
    model = write_byte_level(workspace / "model")
    with running_server(model, workspace, real_text=True, fake={"delay": 0.002}) as server:
        yield server.wait_ready()


def test_the_api_process_loads_neither_torch_nor_transformers(server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "tokenizers" not in maps


def test_the_printed_curl_line_works_as_it_is(server) -> None:
    line = next(line for line in server.stdout.splitlines() if line.strip().startswith("curl"))
    output = subprocess.run(
        ["sh", "-c", line.replace("curl", "curl -s", 1)], capture_output=True, check=True, text=True
    ).stdout
    assert "capital of France" in json.loads(output)["choices"][0]["message"]["content"]
    assert server.url in server.stdout


def test_a_stream_equals_the_whole_answer(server) -> None:
    url = f"{server.url}/v1/chat/completions"
    whole = post(url, json=CHAT).json()
    text = post(url, json={**CHAT, "stream": True}).text
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(block[6:]) for block in text.strip().split("\n\n")[:-1]]
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert "".join(deltas) == "user\nhello 😀 wörld"
    assert not any("\ufffd" in delta for delta in deltas)


def test_openais_own_client_understands_the_server(server) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["fake-model"]
        answer = client.chat.completions.create(model="fake-model", **CHAT)
        assert answer.choices[0].finish_reason == "stop"
        chunks = list(
            client.chat.completions.create(
                model="fake-model", stream=True, stream_options={"include_usage": True}, **CHAT
            )
        )
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="store"):
            client.chat.completions.create(model="fake-model", store=True, **CHAT)
        with pytest.raises(openai.NotFoundError, match="no-such"):
            client.completions.create(model="no-such", prompt="x")


def test_many_clients_at_once_each_get_their_own_answer(server) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        body = {"prompt": f"<{number}>", "max_tokens": len(f"<{number}>")}
        response = post(f"{server.url}/v1/completions", json=body)
        answers[number] = response.json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"<{number}>" for number in range(32)}


def test_a_stop_string_in_a_long_answer_reaches_the_scheduler(server) -> None:
    body = {"prompt": "abcdef", "max_tokens": 4000, "stop": "efab"}
    answer = post(f"{server.url}/v1/completions", json=body).json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "abcd",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer["usage"]["completion_tokens"] == 8
    wait_for(lambda: any(e.endswith(" 8") and "stop_found" in e for e in server.events), "the stop")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_aborts_its_request(server, stream) -> None:
    def count(word: str) -> int:
        return sum(word in event for event in server.events)

    num_requests, num_aborts = count("generate"), count("abort")
    body = json.dumps({**LONG, "stream": stream})
    with contextlib.closing(HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as client:
        client.request("POST", "/v1/completions", body)
        wait_for(lambda: count("generate") == num_requests + 1, "the request")
        if stream:
            client.getresponse().readline()
    wait_for(lambda: count("abort") == num_aborts + 1, "the abort")


def test_requests_that_are_refused_leave_the_server_as_it_was(server) -> None:
    url = f"{server.url}/v1/completions"
    for content in (
        b"{",
        b"[]",
        b'{"prompt": []}',
        b'{"prompt": [5, 1000000]}',
        b'{"prompt": "\\ud800"}',
    ):
        assert post(url, content=content).status_code == 400
    answer = post(url, json={"prompt": "x", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "xx"


def test_a_folder_without_a_tokenizer_is_exit_code_4_and_named(tmp_path) -> None:
    model = tmp_path / "empty-model"
    model.mkdir()
    with running_server(model, tmp_path, real_text=True) as server:
        assert server.wait() == 4
        assert str(model) in server.stderr
        assert "Traceback" not in server.stderr
