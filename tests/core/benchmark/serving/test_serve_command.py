"""``minisgl bench serve`` from the command line to its record and its picture."""

import json
import subprocess
import sys

import pytest

from minisgl.benchmark import environment
from minisgl.cli import main
from support.scripted_server import DONE, chunked, event, scripted_server, text_chunk, usage, whole


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(environment, "find_commit", lambda: "abc123")


def script(_, first, body):
    if "/v1/models" in first:
        return [whole(b'{"data": [{"id": "some-model"}]}')]
    asked = json.loads(body)
    if "messages" in asked:
        delta = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
        return chunked(event(delta), DONE)
    end = event({"choices": [], "usage": usage(5, 2, cached=1)})
    return chunked(text_chunk("a"), 0.01, text_chunk("b", "length"), end, DONE)


@pytest.fixture
def server():
    with scripted_server(script) as server:
        yield server


def bench(server, *flags):
    return main(["bench", "serve", "--base-url", server.url, *flags])


SMALL = ("--num-prompts", "6", "--input-len", "3:5", "--output-len", "4", "--max-token-id", "99")


def test_figures_go_to_the_terminal_and_to_a_file(server, tmp_path, capsys):
    path = tmp_path / "out.json"
    flags = ("--api-key", "secret", "--request-rate", "200", "--ignore-eos", "--warmup", "2")
    limits = ("--goodput", "ttft:10000", "e2el:0.001", "--json-requests")
    extra = ("--extra-body", '{"temperature": 0, "max_tokens": null, "max_completion_tokens": 3}')
    assert bench(server, *SMALL, *flags, *limits, *extra, "--json", str(path)) == 0
    record = json.loads(path.read_text())
    assert record["benchmark"] == "serve"
    assert record["commit"] == "abc123"
    assert record["model"] == "some-model"
    assert record["successful"] == len(record["requests"]) == 6
    assert (record["input_tokens"], record["cached_tokens"], record["output_tokens"]) == (30, 6, 12)
    between = [one["ended"] - one["first_token"] for one in record["requests"]]
    assert record["tpot_ms"]["max"] == pytest.approx(max(between) * 1e3)
    assert record["goodput"]["limits_ms"] == {"ttft": 10000.0, "e2e": 0.001}
    assert record["goodput"]["num_good"] == 0
    assert record["load"]["request_rate"] == 200.0
    assert record["requests"][0]["ttft"] > 0
    assert "secret" not in path.read_text()
    assert server.requests[-1][1]["authorization"] == "bearer secret"
    assert len(server.bodies) == 8, "two requests come first and do not count"
    body = server.bodies[-1]
    assert body.items() >= {"ignore_eos": True, "temperature": 0, "stream": True}.items()
    assert "max_tokens" not in body
    assert 3 <= len(body["prompt"]) <= 5
    text = capsys.readouterr().out
    assert "successful requests" in text
    assert "TPOT" in text


def test_chat_gets_text_and_its_chunks_are_counted_with_a_warning(server, capsys):
    flags = ("--endpoint", "chat", "--num-prompts", "2", "--input-len", "3", "--model", "mine")
    assert bench(server, *flags) == 0
    assert all("/chat/completions" in first for first, _, _ in server.requests)
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 3
    assert server.bodies[0]["model"] == "mine"
    assert "reported no usage for 2 requests" in capsys.readouterr().err


def test_a_trace_is_sent_at_its_times(server, tmp_path):
    trace, path = tmp_path / "trace.jsonl", tmp_path / "out.json"
    lines = [{"timestamp": t, "prompt": f"p{t}", "output_length": 2} for t in (0, 100, 300)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--trace-file", str(trace), "--trace-unit", "ms", "--warmup", "0")
    assert bench(server, *flags, "--json", str(path), "--json-requests") == 0
    requests = json.loads(path.read_text())["requests"]
    assert [one["due"] for one in requests] == pytest.approx([0, 0.1, 0.3])
    assert [body["prompt"] for body in server.bodies] == ["p0", "p100", "p300"]


def test_the_picture_is_a_png(server, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    assert bench(server, *SMALL, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_message_says_what_to_install(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench(server, *SMALL, "--plot", str(tmp_path / "run.png")) == 2
    assert "pip install 'minisgl-core[bench]'" in capsys.readouterr().err
    assert not server.requests


def test_a_server_that_refuses_everything_ends_it_before_the_measurement(capsys):
    refusal = whole(b'{"error": {"message": "no such model"}}', "404 Not Found")
    with scripted_server(lambda *_: [refusal]) as server:
        assert bench(server, *SMALL, "--model", "x") == 1
        assert "HTTP 404: no such model" in capsys.readouterr().err
        assert bench(server, *SMALL, "--model", "x", "--warmup", "0") == 1
        out = capsys.readouterr().out
        assert "failed 6 times: HTTP 404: no such model" in out


def test_a_server_without_models_asks_for_a_name(capsys):
    with scripted_server(lambda *_: [whole(b'{"data": []}')]) as server:
        assert bench(server, *SMALL) == 1
    assert "name one with --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--base-url", "ftp://x"), "--base-url"),
        (("--prefix-len", "5"), "--prefix-len belongs to --dataset shared-prefix, got random"),
        (("--dataset", "trace"), "needs --trace-file"),
        (("--trace-file", "x", "--input-len", "5"), "--input-len does not go with a trace"),
        (("--endpoint", "chat", "--prompt-form", "ids"), "takes text"),
        (("--endpoint", "chat", "--max-token-id", "5"), "--max-token-id belongs to"),
        (("--tokenizer", "x", "--prompt-form", "ids"), "--tokenizer belongs to"),
        (("--json-requests",), "needs --json"),
        (("--max-concurrency", "2", "--processes", "3"), "--processes 3"),
        (("--request-rate", "0"), "--request-rate must be greater than 0, or inf, got '0'"),
        (("--burstiness", "x"), "greater than 0 is needed, got 'x'"),
        (("--goodput", "tfft:3"), "Nearest: 'ttft'"),
        (("--goodput", "ttft"), "greater than 0 is needed"),
        (("--extra-body", "[]"), "must be a JSON object"),
        (("--extra-body", "{"), "is no JSON"),
        (("--api-key", "a\nb"), "Authorization"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message, capsys):
    assert main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err


def test_no_torch_is_loaded(server):
    words = ["bench", "serve", "--base-url", server.url, *SMALL, "--commit", "abc"]
    program = (
        f"import sys\nfrom minisgl.cli import main\nassert main({words!r}) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
