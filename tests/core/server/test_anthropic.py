"""``/v1/messages``, judged by Anthropic's own client."""

import json
from typing import Any

import anthropic
import httpx
import pytest

from minisgl.message import TokenizeRequest
from support.http_asks import CHAT, post, run
from support.in_process_engine import MODEL, Served
from support.official_clients import anthropic_client

MESSAGES = "/v1/messages"
HELLO: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "Hello"}],
}


def ask(**changes: Any) -> Any:
    """A message as the client reads it."""

    async def scenario(server: Served) -> Any:
        async with anthropic_client(server) as client:
            return await client.messages.create(**{**HELLO, **changes})

    return run(scenario)


def stream(**changes: Any) -> tuple[list[Any], Any]:
    """All events of a stream, and the message that the client makes of them."""

    async def scenario(server: Served) -> tuple[list[Any], Any]:
        async with (
            anthropic_client(server) as client,
            client.messages.stream(**{**HELLO, **changes}) as events,
        ):
            found = [event async for event in events]
            return found, await events.get_final_message()

    return run(scenario)


def sent(**changes: Any) -> TokenizeRequest:
    """What a request asks of the tokenizer."""

    async def scenario(server: Served) -> TokenizeRequest:
        response = await server.http.post(MESSAGES, json={**HELLO, **changes})
        assert response.status_code == 200, response.text
        return server.engine.requests[0]

    return run(scenario)


def test_a_message_has_anthropics_shape() -> None:
    message = ask()
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [block.text for block in message.content] == ["user\nHello"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_the_client_knows_the_requests_id() -> None:
    async def scenario(server: Served) -> None:
        headers = {"X-Request-Id": "mine"}
        async with anthropic_client(server) as client:
            message = await client.messages.create(**HELLO, extra_headers=headers)
            assert (message._request_id, message.id) == ("mine", "msg_mine")
            with pytest.raises(anthropic.NotFoundError) as caught:
                await client.messages.create(**{**HELLO, "model": "x"}, extra_headers=headers)
            assert caught.value.request_id == "mine"
        other = await server.http.get("/v1/models")
        assert "request-id" not in other.headers

    run(scenario)


def test_usage_keeps_cached_tokens_apart() -> None:
    usage = ask(max_tokens=7).usage
    body = {"messages": HELLO["messages"], "max_tokens": 7}
    expected = post(CHAT, body).json()["usage"]
    cached = expected["prompt_tokens_details"]["cached_tokens"]
    assert usage.output_tokens == 7
    assert usage.cache_read_input_tokens == cached > 0
    assert usage.input_tokens == expected["prompt_tokens"] - cached


@pytest.mark.parametrize("max_tokens", [1, 7, 50])
def test_a_stream_equals_the_whole_message(max_tokens) -> None:
    whole = ask(max_tokens=max_tokens)
    _, streamed = stream(max_tokens=max_tokens)
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == whole.usage.input_tokens


def test_the_events_come_under_their_names_in_anthropics_order() -> None:
    text = post(MESSAGES, {**HELLO, "stream": True}).text
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in blocks]
    data = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [event["type"] for event in data] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = data[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "ell"]}, "stop_sequence", "ell"),
        ({"stop_sequences": ["lo", "llo"]}, "stop_sequence", "llo"),
        ({}, "end_turn", None),
    ],
)
def test_the_reason_says_what_ended_the_text(fields, reason, sequence, streams) -> None:
    message = stream(**fields)[1] if streams else ask(**fields)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    if sequence:
        assert message.content[0].text == "user\nHello".partition(sequence)[0]


def test_system_text_and_blocks_are_a_chats() -> None:
    request = sent(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "d"},
                ],
            },
        ],
    )
    assert request.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "cd"},
    ]
    assert request.add_generation_prompt


def test_results_of_tools_are_messages_of_their_own() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": "broken", "is_error": True},
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "text", "text": "Go on."},
    ]
    request = sent(
        messages=[
            *HELLO["messages"],
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": blocks},
        ]
    )
    function = {"name": "f", "arguments": '{"x":1}'}
    prompt: Any = request.prompt
    _, turn, *others = prompt
    assert turn["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
    assert others == [
        {"role": "tool", "tool_call_id": "a", "content": "broken", "is_error": True},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


def test_an_assistants_message_at_the_end_is_gone_on_with() -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "The answer"}]
    request = sent(messages=messages)
    assert request.continue_final_message
    assert not request.add_generation_prompt


def test_thinking_is_a_variable_of_the_template() -> None:
    on = {"type": "enabled", "budget_tokens": 1024}
    assert sent(thinking=on).template_kwargs == {"enable_thinking": True, "thinking": True}
    off = sent(thinking={"type": "disabled"}).template_kwargs
    assert off == {"enable_thinking": False, "thinking": False}


def test_a_schema_and_effort_are_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    request = sent(output_config=asked)
    assert request.params.grammar is not None
    assert request.params.grammar.kind == "json_schema"
    assert json.loads(request.params.grammar.value) == schema
    assert request.template_kwargs == {"reasoning_effort": "max"}
    assert sent(output_config={"effort": None}).params.grammar is None


def test_hints_for_a_cache_and_labels_change_nothing(caplog) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    hints = {
        "cache_control": {"type": "ephemeral"}, "user_profile_id": "me", "workspace_id": "w",
        "service_tier": "auto", "metadata": {"user_id": "me"}, "speed": "standard",
        "tool_choice": {"type": "none"},
        "tools": [{**tool, "cache_control": {"type": "ephemeral"}, "strict": True,
                   "input_examples": [{}], "eager_input_streaming": True, "defer_loading": False}],
    }  # fmt: skip
    plain, hinted = sent(), sent(**hints)
    assert hinted.prompt == plain.prompt
    assert hinted.params == plain.params
    assert hinted.tools == plain.tools
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_sampling_fields_reach_the_engine() -> None:
    request = sent(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], priority=3)
    params = request.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert params.stop == ("x",)
    assert params.max_tokens == 50
    assert request.priority == 3


def test_tokens_are_counted_as_the_engine_counts_them() -> None:
    async def scenario(server: Served) -> tuple[int, int]:
        async with anthropic_client(server) as client:
            prompt = {"model": MODEL, "messages": HELLO["messages"], "system": "Be brief."}
            count = await client.messages.count_tokens(**prompt)
            usage = (await client.messages.create(**prompt, max_tokens=1)).usage
            return count.input_tokens, usage.input_tokens + usage.cache_read_input_tokens

    counted, used = run(scenario)
    assert counted == used


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": None}, ["max_tokens is required"]),
        ({"max_tokens": 0}, ["max_tokens", "at least 1"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0].role"]),
        ({"messages": [{"role": "user", "content": []}]}, ["messages[0].content"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["image"]),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ["content[0].text"]),
        ({"system": [{"type": "image"}]}, ["system[0]"]),
        ({"stop_sequences": [""]}, ["stop_sequences", "non-empty"]),
        ({"temperature": -1}, ["temperature", "from 0 to 100"]),
        ({"top_k": -5}, ["top_k"]),
        ({"thinking": {"type": "perhaps"}}, ["thinking.type"]),
        ({"mcp_servers": [{}]}, ["mcp_servers", "not offered"]),
        ({"tools": [{"name": "f"}]}, ["tools[0].input_schema is required"]),
        ({"tool_choice": {"type": "tool"}}, ["tool_choice.name"]),
        ({"output_config": {"format": {"type": "json_schema"}}}, ["output_config.format.schema"]),
        ({"output_config": {"effort": "none"}}, ["output_config.effort", "'low'"]),
        ({"output_config": {"task_budget": {"total": 5}}}, ["output_config.task_budget", "counts"]),
        ({"output_config": {"colour": 1}}, ["output_config.colour is unknown"]),
        ({"speed": "fast"}, ["speed='fast' is not offered", "one speed"]),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_a_400_in_anthropics_form(changes, words) -> None:
    response = post(MESSAGES, {**HELLO, **changes})
    assert response.status_code == 400
    body = response.json()
    assert set(body) == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    for word in words:
        assert word in body["error"]["message"]


def test_errors_are_those_that_the_client_knows() -> None:
    async def scenario(server: Served) -> None:
        async with anthropic_client(server, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**HELLO)
        async with anthropic_client(server, api_key="secret") as client:
            with pytest.raises(anthropic.NotFoundError, match="no-such"):
                await client.messages.create(**{**HELLO, "model": "no-such"})
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                await client.messages.create(**HELLO, extra_body={"temperature": -1})
            server.client.stop_accepting()
            with pytest.raises(anthropic.InternalServerError, match="shutting down"):
                await client.messages.create(**HELLO)

    run(scenario, api_keys=("secret",))


def test_an_error_in_the_middle_of_a_stream_is_an_error_event() -> None:
    async def scenario(server: Served) -> httpx.Response:
        import asyncio

        from minisgl.errors import RequestError

        body = {**HELLO, "max_tokens": 2000, "stream": True}
        body["messages"] = [{"role": "user", "content": "x" * 2000}]
        task = asyncio.create_task(server.http.post(MESSAGES, json=body))
        while not server.engine.scheduler._num_steps > 3:
            await asyncio.sleep(0.001)
        server.client.fail_all(RequestError("the engine is gone", status=500))
        return await task

    last = run(scenario).text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert last[0] == "event: error"
    body = json.loads(last[1].removeprefix("data: "))
    assert body == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine is gone"},
    }


def test_unknown_methods_below_the_route_answer_in_anthropics_form_too() -> None:
    async def scenario(server: Served) -> Any:
        return (await server.http.get(MESSAGES)).json()

    assert run(scenario)["type"] == "error"
