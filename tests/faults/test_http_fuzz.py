"""Nasty values in every field of every route: no 5xx, no hang, and the next one is served.

What schemathesis does with the OpenAPI page stands in tests/clients; these values are our own.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.server.anthropic.request import MessagesRequest
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.completion_request import CompletionRequest
from minisgl.server.responses.request import ResponsesRequest
from minisgl.server.tokens import DetokenizeBody, TokenizeBody
from support.in_process_engine import Served, served
from support.patience import PATIENCE

MESSAGES = [{"role": "user", "content": "ace"}]
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "ace", "max_tokens": 3}),
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 3}),
    "/v1/responses": (ResponsesRequest, {"input": "ace", "max_output_tokens": 3}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 3}),
    "/tokenize": (TokenizeBody, {"prompt": "ace"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5, 6]}),
}
RAISING = "{{ raise_exception('no such message') }}"


class Raw(str):
    """JSON text that stands as it is, such as numbers that no Python value is written as."""

    __slots__ = ()


def dumps(value: Any) -> bytes:
    """Write JSON, with lone surrogates as escapes."""
    if isinstance(value, Raw):
        return value.encode()
    if isinstance(value, dict):
        items = (json.dumps(key).encode() + b":" + dumps(inner) for key, inner in value.items())
        return b"{" + b",".join(items) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(dumps, value)) + b"]"
    return json.dumps(value).encode()


def deep(depth: int, kind: str) -> Raw:
    if kind == "list":
        return Raw("[" * depth + "]" * depth)
    return Raw('{"a":' * depth + "1" + "}" * depth)


NUMBERS = st.sampled_from(
    [
        *(-1, 0, 1, 2, -(2**31), 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**400),
        *(-0.0, 0.5, -1e308, 1e308, 5e-324),
        *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-0")),
    ]
)
TEXTS = st.one_of(
    st.sampled_from(
        [
            *("", " ", "\0", "\x7f\x1b[31m", "\ud800", "a\udfffb", "\ufeff", "\u202e"),
            *("<|im_start|>system\n", "<|im_end|>", "<|endoftext|>", "{{ 7*7 }}", "{% raw %}"),
            *(
                "../../etc/passwd",
                "'; DROP TABLE requests; --",
                "(a+)+$",
                "((((((((((",
                "\\",
                "[",
                "*",
            ),
            *("é" * 500, "🦊" * 300, "a" * 5000, "\r\n\r\nHTTP/1.1 200 OK\r\n"),
        ]
    ),
    st.text(max_size=8),
)
KEYS = st.one_of(
    st.sampled_from(["type", "role", "content", "text", "name", "function", ""]), TEXTS
)
VALUES = st.recursive(
    st.one_of(NUMBERS, TEXTS, st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
HUGE = st.sampled_from(
    [
        ["x"] * 10_000,
        [5] * 10_000,
        [[5]] * 3000,
        {str(token): 1 for token in range(5000)},
        deep(900, "list"),
        deep(900, "dict"),
        deep(100_000, "list"),
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A request that is valid but for a few fields."""
    route = draw(st.sampled_from(sorted(ROUTES)))
    model, body = ROUTES[route]
    body = dict(body)
    fields = [*model.model_fields, *model.not_offered, "no_such_field"]
    for name in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3)):
        body[name] = draw(st.one_of(VALUES, VALUES, VALUES, HUGE))
    if draw(st.booleans()) and "stream" in model.model_fields:
        body["stream"] = True
    return route, dumps(body)


def run(scenario: Callable[[Served], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with served(**options) as server:
            return await asyncio.wait_for(scenario(server), PATIENCE)

    return asyncio.run(main())


async def fine(server: Served) -> bool:
    body = {"prompt": "ace", "max_tokens": 3}
    answer = await server.http.post("/v1/completions", json=body)
    return bool(answer.json()["choices"][0]["text"] == "ace")


def is_fine(answer: httpx.Response) -> bool:
    """Whether a response is an answer, or an error of the client's that says what is wrong."""
    if answer.status_code == httpx.codes.OK:
        return '"server_error"' not in answer.text and '"api_error"' not in answer.text
    error = answer.json()["error"]
    return 400 <= answer.status_code < 500 and bool(error["message"])


@given(st.lists(requests(), min_size=1, max_size=4))
def test_nasty_values_are_answered_or_refused(asked: list[tuple[str, bytes]]) -> None:
    async def scenario(server: Served) -> None:
        for route, body in asked:
            answer = await server.http.post(route, content=body, timeout=PATIENCE)
            assert is_fine(answer), (route, body[:300], answer.status_code, answer.text[:500])
        assert await fine(server)

    run(scenario)


@given(st.sampled_from(sorted(ROUTES)), st.one_of(st.binary(max_size=60), VALUES.map(dumps)))
def test_bodies_that_are_no_request(route: str, body: bytes) -> None:
    async def scenario(server: Served) -> None:
        answer = await server.http.post(route, content=body)
        assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
        assert await fine(server)

    run(scenario)


@pytest.mark.parametrize("route", sorted(ROUTES))
def test_ten_megabytes_of_text_are_refused_and_block_nobody(route: str) -> None:
    body = {**ROUTES[route][1]}
    text = "a b " * (10 * 2**18)
    for name, value in (
        ("prompt", text),
        ("messages", [{"role": "user", "content": text}]),
        ("input", text),
        ("tokens", [5] * 2**20),
    ):
        if name in body:
            body[name] = value

    async def scenario(server: Served) -> None:
        large = asyncio.create_task(server.http.post(route, json=body, timeout=PATIENCE))
        assert await fine(server)
        answer = await large
        assert is_fine(answer)
        assert answer.status_code == 400 or route == "/detokenize"

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_raises_is_the_clients_fault(stream: bool) -> None:
    async def scenario(server: Served) -> list[httpx.Response]:
        body = {"messages": MESSAGES, "max_tokens": 3, "stream": stream}
        answers = [
            await server.http.post(route, json=body)
            for route in ("/v1/chat/completions", "/v1/messages")
        ]
        answers.append(await server.http.post("/v1/responses", json={"input": "a"}))
        answers.append(await server.http.post("/tokenize", json={"messages": MESSAGES}))
        assert await fine(server)
        return answers

    for answer in run(scenario, chat_template=RAISING):
        assert answer.status_code == 400
        assert "no such message" in answer.json()["error"]["message"]
