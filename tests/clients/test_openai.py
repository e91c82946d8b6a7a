"""OpenAI's own package: plain, streamed, parsed, with tools, and what it raises."""

import asyncio
import json

import pytest

from support.patience import PATIENCE
from support.server_process import get

openai = pytest.importorskip("openai", reason="the package openai is not installed")

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_plain_example(example):
    printed = example("openai_chat.py")
    assert "Paris" in printed["answer"]
    assert "four" in printed["stream"]


def test_the_asynchronous_example(example):
    printed = example("openai_async.py")
    assert printed.keys() == {"France", "Italy", "Germany"}
    assert "Paris" in printed["France"]
    assert all("tokens)" in answer for answer in printed.values())


def test_the_example_with_a_pydantic_model(example):
    pytest.importorskip("xgrammar", reason="structured output needs the package xgrammar")
    (line,) = example("openai_parse.py").keys()
    assert line.startswith("name=")
    assert "continent='" in line
    assert "is_capital=" in line


def test_the_example_with_tools(example):
    pytest.importorskip("xgrammar", reason="a forced call needs the package xgrammar")
    printed = example("openai_tools.py")
    assert any(
        line.startswith("get_weather {'city': '") for line in map(": ".join, printed.items())
    )


def test_a_stream_is_the_whole_answer(client):
    options = {"model": "smollm2", "messages": CHAT, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(
        **options, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    text = whole.choices[0].message.content
    assert final.choices[0].message.content == text
    assert "".join(e.delta for e in events if e.type == "content.delta") == text
    assert final.usage == whole.usage
    assert whole.choices[0].finish_reason == final.choices[0].finish_reason


def test_completions_of_several_prompts_with_logprobs(client):
    answer = client.completions.create(
        model="smollm2", prompt=["One, two,", "Red, green,"], max_tokens=3, temperature=0,
        logprobs=2, n=2,
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == 3
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="smollm2", messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert (
        b"".join(bytes(one.bytes) for one in content).decode() == answer.choices[0].message.content
    )
    assert all(len(one.top_logprobs) == 3 for one in content)


def test_responses_whole_and_streamed(client):
    options = {"model": "smollm2", "input": "What is the capital of France?", "temperature": 0}
    whole = client.responses.create(**options, max_output_tokens=16)
    assert "Paris" in whole.output_text
    with client.responses.stream(**options, max_output_tokens=16) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == whole.output_text == stream.get_final_response().output_text


def test_errors_have_their_own_classes(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smollm2", messages=CHAT, temperature=-1)
    assert refused.value.param == "temperature"


def test_a_client_that_leaves_frees_its_place(client, server):
    stream = client.completions.create(
        model="smollm2", prompt="Once upon a time", max_tokens=1500, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    assert get(f"{server}/health").json()["num_running"] >= 0
    stream.close()

    async def until_idle() -> None:
        while get(f"{server}/health").json()["num_running"]:
            await asyncio.sleep(0.2)

    asyncio.run(asyncio.wait_for(until_idle(), PATIENCE))


def test_a_json_object_is_json(client):
    pytest.importorskip("xgrammar", reason="structured output needs the package xgrammar")
    answer = client.chat.completions.create(
        model="smollm2", messages=CHAT, temperature=0, max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}},
                           "required": ["n"], "additionalProperties": False},
            },
        },
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content)["n"] in {1, 2}
