"""Tool calls and reasoning in the shapes of three protocols; the echo says what it is told to."""

import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from minisgl import request as request_module
from minisgl.message import TokenizeRequest
from minisgl.plugins import builtin
from minisgl.plugins.parsers import AnswerParsers
from support.http_asks import CHAT, error_of, events_of
from support.http_asks import run as run_plain
from support.in_process_engine import MODEL, Served
from support.official_clients import anthropic_client, openai_client

TEMPLATE = "{{ messages[-1]['content'] }}{{ eos_token }}"
PARSERS = AnswerParsers(
    next(record for record in builtin.minisgl_tool_parsers() if record.name == "hermes"),
    next(record for record in builtin.minisgl_reasoning_parsers() if record.name == "qwen3"),
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("weather", "time")
]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "time", "arguments": {"city": "Ulm"}}\n</tool_call>'
BOTH = f"<think>\nhm, wörld\n</think>\n\nI look.\n{ONE}\n{TWO}"


def run(scenario: Callable[[Served], Awaitable[Any]], parsers: AnswerParsers = PARSERS) -> Any:
    return run_plain(scenario, chat_template=TEMPLATE, parsers=parsers)


@pytest.fixture(autouse=True)
def everything_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is an echo, so what it cannot do yet does not matter here."""
    monkeypatch.setattr(request_module, "_NOT_YET", {}, raising=False)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 600, **fields}


def whole(text: str, **fields: Any) -> dict[str, Any]:
    """The first choice of a chat."""

    async def scenario(server: Served) -> dict[str, Any]:
        response = await server.http.post(CHAT, json=body(text, **fields))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    return run(scenario)


def streamed(text: str, **fields: Any) -> dict[int, dict[str, Any]]:
    """Each choice of a stream, its deltas put together as clients do it."""

    async def scenario(server: Served) -> list[dict[str, Any]]:
        return events_of(await server.http.post(CHAT, json=body(text, stream=True, **fields)))

    choices: dict[int, dict[str, Any]] = {}
    for event in run(scenario):
        for choice in event["choices"]:
            one = choices.setdefault(choice["index"], {"calls": [], "finish_reason": None})
            assert one["finish_reason"] is None
            one["finish_reason"] = choice["finish_reason"]
            delta = choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                if key in delta:
                    one[key] = one.get(key, "") + delta[key]
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(one["calls"]):
                    assert piece["type"] == "function"
                    assert piece["id"].startswith("call_")
                    one["calls"].append({"name": piece["function"]["name"], "arguments": ""})
                one["calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
    return choices


def sent(**fields: Any) -> TokenizeRequest:
    async def scenario(server: Served) -> TokenizeRequest:
        response = await server.http.post(CHAT, json=body("x", **fields))
        assert response.status_code == 200, response.text
        return server.engine.requests[0]

    return run(scenario)


# Chat completions


def test_anthropics_thinking_can_be_left_out() -> None:
    async def scenario(server: Served) -> list[list[str]]:
        async with anthropic_client(server) as client:
            kinds = []
            for display in ("summarized", "omitted"):
                message = await client.messages.create(
                    model=MODEL, **body(BOTH), thinking={"type": "adaptive", "display": display}
                )
                kinds.append([block.type for block in message.content])
            return kinds

    assert run(scenario) == [["thinking", "text"], ["text"]]


def test_a_whole_answer_has_content_reasoning_and_calls() -> None:
    choice = whole(BOTH, tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"].strip() == "I look."
    assert message["reasoning"] == message["reasoning_content"]
    assert message["reasoning"].strip() == "hm, wörld"
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "time"]
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    assert arguments == [{"city": "Zürich 😀"}, {"city": "Ulm"}]
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"return_token_ids": True}, {"n": 2}])
@pytest.mark.parametrize("text", [BOTH, ONE, "no call at all", "<think>\nonly\n</think>\nx"])
def test_a_stream_says_what_the_whole_answer_says(text, more) -> None:
    choice = whole(text, tools=TOOLS)
    for one in streamed(text, tools=TOOLS, **more).values():
        assert one["finish_reason"] == choice["finish_reason"]
        message = choice["message"]
        assert one.get("content", "") == (message["content"] or "")
        assert one.get("reasoning") == message.get("reasoning") == one.get("reasoning_content")
        expected = [call["function"] for call in message.get("tool_calls", ())]
        assert one["calls"] == expected


@pytest.mark.parametrize("text", ["I look <tool_ca", "<thi", "x\n<tool_call"])
def test_what_a_parser_holds_back_comes_out_at_the_end(text) -> None:
    assert whole(text, tools=TOOLS)["message"]["content"] == text
    [one] = streamed(text, tools=TOOLS).values()
    assert one["content"] == text


def test_content_is_null_beside_calls_alone() -> None:
    assert whole(ONE, tools=TOOLS)["message"]["content"] is None


def test_logprobs_of_tokens_that_a_parser_held_back_are_not_lost() -> None:
    num = len(whole(BOTH, tools=TOOLS, logprobs=True)["logprobs"]["content"])

    async def scenario(server: Served) -> int:
        fields = body(BOTH, tools=TOOLS, stream=True, logprobs=True)
        events = events_of(await server.http.post(CHAT, json=fields))
        logprobs = [event["choices"][0]["logprobs"] for event in events]
        return sum(len(found["content"]) for found in logprobs if found)

    assert run(scenario) == num > 100


def test_without_tools_calls_are_text() -> None:
    choice = whole(ONE)
    assert choice["message"]["content"] == ONE
    assert choice["finish_reason"] == "stop"


def test_an_answer_that_is_cut_off_ends_with_length() -> None:
    assert whole(ONE, tools=TOOLS, max_tokens=20)["finish_reason"] == "length"


LIST = '[{"name": "time", "parameters": {"city": "Ulm"}}, {"name": "weather", "parameters": {}}]'
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_call_is_no_content_where_there_is_nothing_but_calls(stream) -> None:
    """Wherever ``max_tokens`` cuts: what has begun is a call, and the rest is nothing."""
    fields = {"tools": TOOLS, "tool_choice": "required"}
    seen = set()
    for limit in range(1, len(LIST) + 2):
        if stream:
            [one] = streamed(LIST, **fields, max_tokens=limit).values()
            content, calls = one.get("content", ""), one["calls"]
        else:
            one = whole(LIST, **fields, max_tokens=limit)
            content = one["message"]["content"] or ""
            calls = [call["function"] for call in one["message"].get("tool_calls", ())]
        assert content == "", limit
        text = "".join(call["arguments"] for call in calls)
        assert '{"city": "Ulm"}{}'.startswith(text)
        seen.add((len(calls), one["finish_reason"]))
        if one["finish_reason"] != "length":
            break
    assert seen == {(0, "length"), (1, "length"), (2, "length"), (2, "tool_calls")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "choice", "stop", "reason", "arguments"),
    [
        ('{"city": "Ulm"}', NAMED, "lm", "stop", ['{"city": "U']),
        ('{"city": "Ulm"}', NAMED, '"}', "stop", ['{"city": "Ulm']),
        ('{"city": "Ulm"} .', NAMED, ".", "tool_calls", ['{"city": "Ulm"}']),
        (LIST, "required", "weather", "tool_calls", ['{"city": "Ulm"}']),
        (LIST, "required", "lm", "stop", ['{"city": "U']),
        (f"{TWO}{ONE}", "auto", "ich", "stop", ['{"city": "Ulm"}', '{"city": "Zür']),
        (f"{TWO}{ONE}", "auto", '{"name": "w', "tool_calls", ['{"city": "Ulm"}']),
    ],
)
def test_a_call_that_a_stop_string_has_cut_is_no_reason(
    said, choice, stop, reason, arguments, stream
) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "stop": stop}
    if stream:
        [one] = streamed(said, **fields).values()
        calls = one["calls"]
    else:
        one = whole(said, **fields)
        calls = [call["function"] for call in one["message"]["tool_calls"]]
    assert [call["arguments"] for call in calls] == arguments
    assert one["finish_reason"] == reason


def test_one_call_only_where_calls_may_not_be_parallel() -> None:
    message = whole(BOTH, tools=TOOLS, parallel_tool_calls=False)["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    [one] = streamed(BOTH, tools=TOOLS, parallel_tool_calls=False).values()
    assert [call["name"] for call in one["calls"]] == ["weather"]


def test_reasoning_is_counted_and_can_be_left_out() -> None:
    async def scenario(server: Served) -> tuple[dict[str, Any], dict[str, Any]]:
        shown = await server.http.post(CHAT, json=body(BOTH))
        hidden = await server.http.post(CHAT, json=body(BOTH, include_reasoning=False))
        return shown.json(), hidden.json()

    shown, hidden = run(scenario)
    num = shown["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 5 < num < shown["usage"]["completion_tokens"]
    assert "reasoning" in shown["choices"][0]["message"]
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["choices"][0]["message"]["content"] == shown["choices"][0]["message"]["content"]
    assert hidden["usage"]["completion_tokens"] == shown["usage"]["completion_tokens"]


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    assert [tool["function"]["name"] for tool in sent(tools=TOOLS).tools] == ["weather", "time"]
    assert sent(tools=TOOLS, tool_choice="none").tools == []
    assert sent(tools=TOOLS).return_prompt_tail


def test_special_tokens_are_shown_where_calls_are_written_with_them() -> None:
    mistral = next(r for r in builtin.minisgl_tool_parsers() if r.name == "mistral")
    assert mistral.shows_special_tokens

    async def scenario(server: Served) -> list[bool]:
        for fields in ({"tools": TOOLS}, {}):
            await server.http.post(CHAT, json=body("x", **fields))
        return [request.params.skip_special_tokens for request in server.engine.requests]

    assert run(scenario, AnswerParsers(mistral, None)) == [False, True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "name"),
    [
        ("required", '[{"name": "time", "parameters": {"city": "Ulm"}}]', "time"),
        ({"type": "function", "function": {"name": "weather"}}, '{"city": "Ulm"}', "weather"),
    ],
)
def test_a_demanded_call_is_held_to_its_schema_and_read(choice, text, name, stream) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice}
    grammar = sent(**fields).params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    if stream:
        [one] = streamed(text, **fields).values()
        calls, reason = one["calls"], one["finish_reason"]
    else:
        found = whole(text, **fields)
        calls = [call["function"] for call in found["message"]["tool_calls"]]
        reason = found["finish_reason"]
    assert reason == "tool_calls"
    assert [call["name"] for call in calls] == [name]
    assert json.loads(calls[0]["arguments"]) == {"city": "Ulm"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "sound"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": 5}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
    ids=str,
)
def test_malformed_tools_are_a_400_that_names_the_place(fields, param) -> None:
    async def scenario(server: Served) -> Any:
        return await server.http.post(CHAT, json=body("x", **fields))

    response = run(scenario)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_a_server_that_cannot_read_calls_refuses_to_leave_them_to_the_model() -> None:
    async def scenario(server: Served) -> list[Any]:
        return [
            await server.http.post(CHAT, json=body("x", tools=TOOLS, tool_choice=choice))
            for choice in ("auto", "none")
        ]

    refused, fine = run(scenario, AnswerParsers())
    assert error_of(refused)["param"] == "tool_choice"
    assert fine.status_code == 200


# The clients that vendors publish


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_reads_calls_and_sends_their_results_back(stream) -> None:
    async def scenario(server: Served) -> Any:
        async with openai_client(server) as client:
            chat: Any = client.chat.completions
            fields = body(BOTH, tools=TOOLS, model=MODEL)
            if not stream:
                message = (await chat.create(**fields)).choices[0].message
            else:
                async with chat.stream(**fields) as events:
                    async for _ in events:
                        pass
                    message = (await events.get_final_completion()).choices[0].message
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "rain"}
                for call in message.tool_calls
            ]
            messages = [*fields["messages"], message.model_dump(exclude_none=True), *results]
            again = await chat.create(**{**fields, "messages": messages})
            assert again.choices[0].message.content == "rain"
            return message

    message = run(scenario)
    assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Zürich 😀"}
    assert message.reasoning_content.strip() == "hm, wörld"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_reads_thinking_text_and_tool_use(stream) -> None:
    tools: Any = [{"name": name, "input_schema": PARAMETERS} for name in ("weather", "time")]

    async def scenario(server: Served) -> Any:
        async with anthropic_client(server) as client:
            fields: Any = {**body(BOTH), "model": MODEL, "tools": tools}
            if not stream:
                message = await client.messages.create(**fields)
            else:
                async with client.messages.stream(**fields) as events:
                    message = await events.get_final_message()
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
                for block in message.content
                if block.type == "tool_use"
            ]
            turn = {"role": "assistant", "content": message.to_dict()["content"]}
            messages = [*fields["messages"], turn, {"role": "user", "content": results}]
            again = await client.messages.create(**{**fields, "messages": messages})
            assert again.content[0].text == "rain"
            return message, server.engine.requests[1].prompt

    message, prompt = run(scenario)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking.strip() == "hm, wörld"
    assert message.content[1].text.strip() == "I look."
    assert message.content[2].input == {"city": "Zürich 😀"}
    assert message.stop_reason == "tool_use"
    _, turn, first, second = prompt
    assert turn["reasoning_content"].strip() == "hm, wörld"
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["weather", "time"]
    assert [result["role"] for result in (first, second)] == ["tool", "tool"]
    assert first["tool_call_id"] == turn["tool_calls"][0]["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_reasoning_message_and_function_call_items(stream) -> None:
    tools: Any = [
        {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False}
        for name in ("weather", "time")
    ]

    async def scenario(server: Served) -> Any:
        async with openai_client(server) as client:
            fields: Any = {"model": MODEL, "tools": tools}
            first: Any = [{"role": "user", "content": BOTH}]
            if not stream:
                response: Any = await client.responses.create(**fields, input=first)
            else:
                async with client.responses.stream(**fields, input=first) as events:
                    async for _ in events:
                        pass
                    response = await events.get_final_response()
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
                for item in response.output
                if item.type == "function_call"
            ]
            said = [item.to_dict() for item in response.output]
            for item in said:
                item.pop("parsed_arguments", None)
            turns: Any = [*first, *said, *results]
            again = await client.responses.create(**fields, input=turns)
            assert again.output_text == "rain"
            return response, server.engine.requests[1].prompt

    response, prompt = run(scenario)
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].content[0].text.strip() == "hm, wörld"
    assert response.output_text.strip() == "I look."
    assert json.loads(response.output[2].arguments) == {"city": "Zürich 😀"}
    assert response.usage.output_tokens_details.reasoning_tokens > 5
    assert len(prompt[1]["tool_calls"]) == 2
    assert prompt[1]["reasoning_content"].strip() == "hm, wörld"


def named_events(route: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream of named events."""

    async def scenario(server: Served) -> str:
        return (await server.http.post(route, json={**fields, "stream": True})).text

    blocks = run(scenario).removesuffix("\n\n").split("\n\n")
    return [json.loads(block.split("\ndata: ")[1]) for block in blocks]


def test_anthropics_blocks_begin_and_stop_one_after_the_other() -> None:
    tools = [{"name": name, "input_schema": PARAMETERS} for name in ("weather", "time")]
    events = named_events("/v1/messages", {**body(BOTH), "tools": tools})
    steps = [(e["type"], e["index"]) for e in events if e["type"].startswith("content_block_")]
    assert [step for step, _ in itertools.groupby(steps)] == [
        (f"content_block_{what}", index)
        for index in range(4)
        for what in ("start", "delta", "stop")
    ]


def test_items_of_a_response_are_added_and_done_one_after_the_other() -> None:
    tools = [{"type": "function", "name": n, "parameters": PARAMETERS} for n in ("weather", "time")]
    events = named_events("/v1/responses", {"input": BOTH, "tools": tools})
    steps = [
        (event["type"].rpartition(".")[2], event["output_index"], event["item"]["status"])
        for event in events
        if event["type"].startswith("response.output_item.")
    ]
    assert steps == [
        (what, index, status)
        for index in range(4)
        for what, status in (("added", "in_progress"), ("done", "completed"))
    ]
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)


def test_a_required_call_of_the_other_protocols_is_the_same() -> None:
    async def scenario(server: Served) -> list[Any]:
        bodies: list[tuple[str, dict[str, Any]]] = [
            (
                "/v1/messages",
                {
                    **body("x"),
                    "tools": [{"name": "weather", "input_schema": PARAMETERS}],
                    "tool_choice": {"type": "tool", "name": "weather"},
                },
            ),
            (
                "/v1/responses",
                {
                    "input": "x",
                    "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}],
                    "tool_choice": {"type": "function", "name": "weather"},
                },
            ),
        ]
        for route, fields in bodies:
            response = await server.http.post(route, json=fields)
            assert response.status_code == 200, response.text
        return [request.params.grammar for request in server.engine.requests]

    one, two = run(scenario)
    assert one == two
    assert json.loads(one.value) == PARAMETERS


def test_tools_count_as_tokens_and_are_checked_by_tokenize() -> None:
    async def scenario(server: Served) -> Any:
        bad = {"messages": body("x")["messages"], "tools": [{"type": "sound"}]}
        return await server.http.post("/tokenize", json=bad)

    assert error_of(run(scenario))["param"] == "tools[0].type"
