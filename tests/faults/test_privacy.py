"""Prompts, answers and keys appear in no log, at no level, whatever goes wrong with them."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from support.server_process import get, post, running_server
from support.text_tokenizers import write_byte_level

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SECRET = "zebra-velvet-4711"
KEY = "key-umbrella-0815"
QUOTING = (
    "{% for message in messages %}{% if message['role'] == 'quoted' %}"
    "{{ raise_exception('this is wrong: ' + message['content']) }}{% endif %}{% endfor %}"
)
"""Begins a template whose error has the client's text."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def bodies() -> list[tuple[str, dict[str, Any]]]:
    message = {"role": "user", "content": SECRET}
    return [
        (TEXT, {"prompt": SECRET, "max_tokens": 20}),
        (TEXT, {"prompt": SECRET, "max_tokens": 20, "stream": True}),
        (TEXT, {"prompt": SECRET * 1000, "max_tokens": 20}),  # too long
        (TEXT, {"prompt": SECRET, "stop": [SECRET], "bad_words": [SECRET]}),
        (TEXT, {"prompt": SECRET, "regex": f"({SECRET}"}),
        (TEXT, {"prompt": SECRET, "cache_salt": SECRET, "user": SECRET}),
        (TEXT, {"prompt": {"wrong": SECRET}}),
        (TEXT, {"prompt": SECRET, "temperature": SECRET}),
        (TEXT, {"prompt": SECRET, "model": SECRET}),
        (CHAT, {"messages": [message], "max_tokens": 20}),
        (CHAT, {"messages": [{**message, "role": SECRET}]}),
        (CHAT, {"messages": [{**message, "role": "quoted"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}]}),
        (CHAT, {"messages": [message], "chat_template_kwargs": {SECRET: SECRET}}),
        (CHAT, {"messages": [message], "tools": [{"type": "function", "function": SECRET}]}),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 5}),
        ("/v1/messages", {"messages": [message], "max_tokens": 5, "system": SECRET}),
        ("/tokenize", {"prompt": SECRET}),
        ("/tokenize", {"messages": [{"role": "user", "content": SECRET, "name": 5}]}),
    ]


def test_neither_prompts_nor_keys_are_logged_at_any_level(tmp_path: Path) -> None:
    model = write_byte_level(tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(QUOTING + template.read_text())
    settings = {"log": {"level": "debug"}, "server": {"api_key": [KEY]}}
    with running_server(model, tmp_path, real_text=True, **settings) as server:
        server.wait_ready()
        key = {"Authorization": f"Bearer {KEY}"}
        answers = [post(f"{server.url}{route}", json=body, headers=key) for route, body in bodies()]
        assert {answer.status_code for answer in answers} <= {200, 400, 404}
        assert SECRET in answers[0].text, "the echoing engine has answered with the prompt"
        wrong = {"Authorization": f"Bearer {KEY}x", "X-Api-Key": SECRET}
        assert get(f"{server.url}/v1/models", headers=wrong).status_code == 401
        post(f"{server.url}{TEXT}", content=f'{{"prompt": "{SECRET}', headers=key)
        server.kill(signal.SIGTERM)
        assert server.wait() == 0
        told = server.stdout + server.stderr
        assert "serves" in told
        assert SECRET not in told
        assert KEY not in told
