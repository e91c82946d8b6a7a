"""``/v1/responses``, judged by OpenAI's own client."""

import json
from typing import Any

import httpx
import openai
import pytest

from minisgl.message import TokenizeRequest
from support.http_asks import error_of, post, run
from support.in_process_engine import MODEL, Served
from support.official_clients import openai_client

RESPONSES = "/v1/responses"
HELLO: dict[str, Any] = {"model": MODEL, "input": "Hello"}


def ask(**changes: Any) -> Any:
    """A response as the client reads it."""

    async def scenario(server: Served) -> Any:
        async with openai_client(server) as client:
            return await client.responses.create(**{**HELLO, **changes})

    return run(scenario)


def stream(**changes: Any) -> tuple[list[Any], Any]:
    """All events of a stream, and the response at its end."""

    async def scenario(server: Served) -> tuple[list[Any], Any]:
        async with (
            openai_client(server) as client,
            client.responses.stream(**{**HELLO, **changes}) as events,
        ):
            found = [event async for event in events]
            return found, found[-1].response

    return run(scenario)


def sent(**changes: Any) -> TokenizeRequest:
    """What a request asks of the tokenizer."""

    async def scenario(server: Served) -> TokenizeRequest:
        response = await server.http.post(RESPONSES, json={**HELLO, **changes})
        assert response.status_code == 200, response.text
        return server.engine.requests[0]

    return run(scenario)


def test_alternatives_without_log_probabilities_are_refused_in_this_apis_words() -> None:
    error = error_of(post(RESPONSES, {**HELLO, "top_logprobs": 2}))
    assert error["param"] == "top_logprobs"
    assert "'message.output_text.logprobs' in include" in error["message"]


def test_a_response_has_openais_shape() -> None:
    response = ask(metadata={"a": "b"}, user="me")
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.output_text == "user\nHello"
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.metadata == {"a": "b"}
    assert response.incomplete_details is None
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens // 2


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    response = ask(max_output_tokens=7)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 7
    assert response.output[-1].status == "incomplete"


@pytest.mark.parametrize("limit", [1, 7, None])
def test_a_stream_equals_the_whole_response(limit) -> None:
    fields = {} if limit is None else {"max_output_tokens": limit}
    whole = ask(**fields)
    events, streamed = stream(**fields)
    assert streamed.output_text == whole.output_text
    assert streamed.status == whole.status
    assert streamed.usage == whole.usage
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_the_events_come_numbered_under_their_names_in_openais_order() -> None:
    text = post(RESPONSES, {**HELLO, "stream": True}).text
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in blocks]
    data = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [event["type"] for event in data] == names
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert data[0]["response"]["status"] == "in_progress"
    assert data[-1]["response"]["output"] == [data[-2]["item"]]


def test_input_items_are_a_chats_messages() -> None:
    request = sent(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "two"}],
            },
            {"role": "developer", "content": "c"},
        ],
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
    ]
    assert request.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "developer", "content": "c"},
    ]


def test_what_the_server_said_can_be_sent_back() -> None:
    said = ask().to_dict()["output"]
    request = sent(input=[{"role": "user", "content": "Hello"}, *said])
    assert request.prompt[-1] == {"role": "assistant", "content": "user\nHello"}


def test_fields_reach_the_engine() -> None:
    request = sent(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=5,
        max_output_tokens=9,
        reasoning={"effort": "high"},
        priority=2,
        cache_salt="s",
    )
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 3, 0.1)
    assert (params.seed, params.max_tokens) == (5, 9)
    assert request.template_kwargs == {"reasoning_effort": "high"}
    assert (request.priority, request.cache_salt) == (2, "s")


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_come_if_they_are_included(streams) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = stream(**fields)[1] if streams else ask(**fields)
    [part] = response.output[0].content
    assert bytes(b for e in part.logprobs for b in e.bytes or []).decode() == "user\nHello"
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert len(part.logprobs) == response.usage.output_tokens


def test_streamed_logprobs_are_those_of_the_whole() -> None:
    fields = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "max_output_tokens": 5,
    }
    events, final = stream(**fields)
    found = [
        entry
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    whole = ask(**fields).output[0].content[0].logprobs
    # A token without text, such as the first one, travels with the next text.
    assert [entry.logprob for entry in found] == [entry.logprob for entry in whole]
    assert final.output[0].content[0].logprobs == whole


@pytest.mark.parametrize("store", [None, True, False])
def test_nothing_is_stored_and_the_answer_says_so(store) -> None:
    assert post(RESPONSES, {**HELLO, "store": store}).json()["store"] is False


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["thoughts"]}, "include[0]"),
        ({"text": {"format": {"type": "sound"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(changes, param) -> None:
    response = post(RESPONSES, {**HELLO, **changes})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_errors_are_those_that_the_client_knows() -> None:
    async def scenario(server: Served) -> None:
        async with openai_client(server) as client:
            with pytest.raises(openai.NotFoundError, match="no-such"):
                await client.responses.create(model="no-such", input="x")
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await client.responses.create(**HELLO, previous_response_id="resp_1")

    run(scenario)


def test_a_failure_in_the_middle_is_an_error_event_and_a_failed_response() -> None:
    async def scenario(server: Served) -> httpx.Response:
        import asyncio

        from minisgl.errors import RequestError

        body = {**HELLO, "max_output_tokens": 2000, "stream": True, "input": "x" * 1000}
        task = asyncio.create_task(server.http.post(RESPONSES, json=body))
        while not server.engine.scheduler._num_steps > 3:
            await asyncio.sleep(0.001)
        server.client.fail_all(RequestError("the engine is gone", status=500))
        return await task

    *_, error, failed = run(scenario).text.removesuffix("\n\n").split("\n\n")
    assert error.startswith("event: error\n")
    assert json.loads(error.split("data: ")[1])["message"] == "the engine is gone"
    response = json.loads(failed.split("data: ")[1])["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", "the engine is gone")
