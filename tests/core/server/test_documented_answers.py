"""Real answers and events against the schemas of ``/openapi.json`` and the clients' types."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from minisgl.errors import RequestError
from minisgl.plugins import builtin
from minisgl.plugins.parsers import AnswerParsers
from minisgl.server.route_docs import ROUTE_DOCS
from support.http_asks import CHAT, TEXT, run
from support.in_process_engine import Served

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
TEMPLATE = "{{ messages[-1]['content'] }}{{ eos_token }}"
PARSERS = AnswerParsers(
    next(record for record in builtin.minisgl_tool_parsers() if record.name == "hermes"),
    next(record for record in builtin.minisgl_reasoning_parsers() if record.name == "qwen3"),
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SAID = f"<think>\nhm, wörld\n</think>\n\nI look.\n{CALL}\nThen {CALL}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}

KEY = "secret"

Ask = tuple[str, dict[str, Any]]

ASKS: list[Ask] = [
    *(
        (CHAT, {"messages": [{"role": "user", "content": SAID}], "max_tokens": 600, **more})
        for more in (
            {},
            {"n": 2},
            {"max_tokens": 1},
            {"logprobs": True, "top_logprobs": 2},
            {"prompt_logprobs": 1, "return_token_ids": True},
            {"tools": [{"type": "function", "function": FUNCTION}]},
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
    ),
    *(
        (TEXT, {"prompt": "Hello", "max_tokens": 2, **more})
        for more in (
            {},
            {"n": 2},
            {"logprobs": 2},
            {"prompt_logprobs": 1, "return_token_ids": True},
            {"echo": True, "logprobs": 2},
            {"echo": True, "max_tokens": 0},
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
    ),
    *(
        (RESPONSES, {"input": SAID, **more})
        for more in (
            {},
            {"max_output_tokens": 3},
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"tools": [{"type": "function", **FUNCTION, "output_schema": {}}]},
            {"instructions": "x", "user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k",
             "safety_identifier": "s", "reasoning": {"effort": "low"}, "tool_choice": "none"},
            {"input": "{}", "text": {"format": {"type": "json_object"}}},
        )
    ),
    *(
        (MESSAGES, {"messages": [{"role": "user", "content": SAID}], "max_tokens": 600, **more})
        for more in (
            {},
            {"max_tokens": 1},
            {"stop_sequences": ["look"]},
            {"tools": [{"name": "weather", "input_schema": PARAMETERS}]},
        )
    ),
]  # fmt: skip

OFFICIAL: dict[str, tuple[Any, Any]] = {
    CHAT: (ChatCompletion, ChatCompletionChunk),
    TEXT: (Completion, Any),  # OpenAI streams a finish_reason of null, which its type leaves out
    RESPONSES: (Response, ResponseStreamEvent),
    MESSAGES: (Message, RawMessageStreamEvent),
}


class Page:
    """What ``/openapi.json`` says about answers."""

    def __init__(self, page: dict[str, Any]) -> None:
        self._page = page

    def check(self, path: str, response: httpx.Response) -> list[Any]:
        """Hold a response against its schema; return its JSON, or that of each event."""
        method = response.request.method.lower()
        documented = self._page["paths"][path][method]["responses"][str(response.status_code)]
        kind = response.headers["content-type"].partition(";")[0]
        schema = documented["content"][kind]["schema"]
        if kind == "text/plain":
            assert schema == {"type": "string"}
            return [response.text]
        parts = list(events_of(response.text)) if "event-stream" in kind else [response.json()]
        validator = jsonschema.Draft202012Validator(
            {**schema, "components": self._page["components"]}
        )
        for part in parts:
            validator.validate(part)
        return parts


def events_of(text: str) -> Iterator[Any]:
    """The JSON of each event, whose name is its type if it has one."""
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.rpartition("data: ")
        if data == "[DONE]":
            continue
        value = json.loads(data)
        assert name == (f"event: {value['type']}\n" if name else "")
        yield value


async def page_of(server: Served) -> Page:
    headers = {"Authorization": f"Bearer {KEY}"}
    return Page((await server.http.get("/openapi.json", headers=headers)).json())


def run_with_parsers(scenario: Any, **options: Any) -> Any:
    return run(scenario, chat_template=TEMPLATE, parsers=PARSERS, **options)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("route", "fields"), ASKS, ids=[f"{n}{a[0]}" for n, a in enumerate(ASKS)])
def test_an_answer_is_what_the_page_and_the_official_types_say(route, fields, stream) -> None:
    if not stream:
        fields = {name: value for name, value in fields.items() if name != "stream_options"}

    async def scenario(server: Served) -> list[Any]:
        response = await server.http.post(route, json={**fields, "stream": stream})
        assert response.status_code == 200, response.text
        return (await page_of(server)).check(route, response)

    parts = run_with_parsers(scenario)
    has_null = fields.get("echo") and fields.get("logprobs")  # as OpenAI documents, and no type
    official = TypeAdapter(Any if has_null else OFFICIAL[route][stream])
    for part in parts:
        if part.get("type") != "ping":  # which Anthropic's client takes out before
            official.validate_python(part)
    kinds = {part.get("type", "") for part in parts}
    if stream and route == RESPONSES and "tools" in fields:
        assert {"response.reasoning_text.done", "response.function_call_arguments.done"} <= kinds
    if stream and route == MESSAGES:
        assert {"message_start", "ping", "message_delta", "message_stop"} <= kinds


@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_a_failure_in_a_stream_is_what_the_page_says(route) -> None:
    long = "x" * 2000
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": long}]},
        TEXT: {"prompt": long, "max_tokens": 2000},
        RESPONSES: {"input": long},
        MESSAGES: {"messages": [{"role": "user", "content": long}], "max_tokens": 2000},
    }
    fields = bodies[route]

    async def scenario(server: Served) -> list[Any]:
        task = asyncio.create_task(server.http.post(route, json={**fields, "stream": True}))
        while not server.engine.scheduler._num_steps > 3:
            await asyncio.sleep(0.001)
        server.client.fail_all(RequestError("the engine is gone", status=500))
        return (await page_of(server)).check(route, await task)

    parts = run(scenario)
    assert "the engine is gone" in str(parts[-1])


@pytest.mark.parametrize("doc", ROUTE_DOCS, ids=lambda doc: doc.path)
def test_every_route_answers_as_documented_and_so_do_its_refusals(doc) -> None:
    model = {"{name}": "org/fake-model"}
    fields: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        TEXT: {"prompt": "x", "max_tokens": 1},
        RESPONSES: {"input": "x"},
        MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        COUNT: {"messages": [{"role": "user", "content": "x"}]},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
    }

    async def scenario(server: Served) -> None:
        while server.client.heartbeat.last is None:
            await asyncio.sleep(0.001)
        page = await page_of(server)

        async def ask(key: str = KEY, path: str = doc.path, **more: Any) -> httpx.Response:
            for place, name in model.items():
                path = path.replace(place, name)
            headers = {"Authorization": f"Bearer {key}"}
            if doc.body is None:
                return await server.http.request(doc.method, path, headers=headers)
            body = {**fields[doc.path], **more}
            return await server.http.request(doc.method, path, headers=headers, json=body)

        answers = [await ask()]
        assert answers[0].status_code == 200, answers[0].text
        if 401 in doc.errors:
            answers.append(await ask("wrong"))
        if doc.body is not None:
            answers += [await ask(model="no-such"), await ask(model=5)]
        elif 404 in doc.errors:
            answers.append(await ask(path="/v1/models/no-such"))
        server.client.stop_accepting()
        if {400, 503} <= set(doc.errors):
            answers.append(await ask())
        seen = []
        for response in answers:
            seen.append(response.status_code)
            [part] = page.check(doc.path, response)
            if doc.path == COUNT and response.status_code == 200:
                MessageTokensCount.model_validate(part, strict=True)
        assert {s for s in (401, 404, 400, 503) if s in doc.errors} - set(seen) <= {503}

    run(scenario, api_keys=(KEY,))


def test_an_unhealthy_server_says_so_as_documented() -> None:
    async def scenario(server: Served) -> None:
        response = await server.http.get("/health")
        assert response.status_code == 503
        (await page_of(server)).check("/health", response)

    run(scenario, pings=False)
