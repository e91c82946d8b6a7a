"""Answers of a given form that begin with reasoning: as the prompt says, and as they are read."""

import json
from typing import Any

import msgspec
import pytest

from minisgl.message import GenerateRequest, PromptEcho, TextReply, TokenizeRequest
from minisgl.plugins import builtin
from minisgl.plugins.parsers import AnswerParsers
from minisgl.request import GrammarSpec, ReasoningTags, SamplingParams
from minisgl.server.generation import merged
from minisgl.tokenizer.answers import answer
from minisgl.tokenizer.encoding import PromptEncoder
from support.http_asks import CHAT, events_of, run
from support.in_process_engine import Served
from support.text_tokenizers import byte_level

TEMPLATE = (
    "{{ messages[-1]['content'] }}{{ eos_token }}"
    "{% if add_generation_prompt %}{{ opening or '' }}{% endif %}"
)
RECORDS = {record.name: record for record in builtin.minisgl_reasoning_parsers()}
TAGS = ReasoningTags("<think>", "</think>")
IMPLIED = ReasoningTags("<think>", "</think>", implied=True)
FORM = {"type": "json_object"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def read(said: str, opening: str, *, stream: bool, parser: str = "qwen3", **fields: Any) -> Any:
    """Reasoning, content, calls and finish reason of an answer that says ``said``."""

    async def scenario(server: Served) -> Any:
        body = {
            "messages": [{"role": "user", "content": said}],
            "max_tokens": 400,
            "stream": stream,
            "chat_template_kwargs": {"opening": opening},
            **fields,
        }
        return await server.http.post(CHAT, json=body)

    parsers = AnswerParsers(None, RECORDS[parser])
    response = run(scenario, chat_template=TEMPLATE, parsers=parsers)
    assert response.status_code == 200, response.text
    if not stream:
        [choice] = response.json()["choices"]
        deltas, reason = [choice["message"]], choice["finish_reason"]
    else:
        choices = [event["choices"][0] for event in events_of(response)]
        deltas, reason = [one["delta"] for one in choices], choices[-1]["finish_reason"]
    reasoning = "".join(delta.get("reasoning") or "" for delta in deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(piece.get("arguments") or "" for piece in pieces)
    return reasoning, content, arguments, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "opening", "reasoning", "content"),
    [
        ('hm\n</think>{"a": 1}', "<think>\n", "hm", '{"a": 1}'),
        ('hm</think>\n\n{"a": 1}', "<think>\n", "hm", '\n\n{"a": 1}'),  # the form's own breaks
        ('<think>\nhm</think>{"a": 1}', "", "hm", '{"a": 1}'),
        ('{"a": "</think>"}', "", "", '{"a": "</think>"}'),
        ('{"a": 1}', "<think>\n\n</think>\n\n", "", '{"a": 1}'),
        ('<think>x</think>{"a": 1}', "<think></think>", "", '<think>x</think>{"a": 1}'),
        ("hm", "<think>\n", "hm", ""),
    ],
)
def test_reasoning_ends_where_the_form_begins(said, opening, reasoning, content, stream) -> None:
    found = read(said, opening, stream=stream, response_format=FORM)
    assert found == (reasoning, content, "", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_read_behind_the_reasoning(stream) -> None:
    said = 'hm</think>[{"name": "f", "parameters": {}}]'
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    found = read(said, "<think>\n", stream=stream, **fields)
    assert found == ("hm", "", "{}", "tool_calls")
    named: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    assert read("hm</think>{}", "", stream=stream, parser="deepseek_r1", **named) == found


@pytest.mark.parametrize("asked", [{}, {"regex": "x"}])
def test_the_engine_hears_of_tags_with_a_form_only(asked) -> None:
    async def scenario(server: Served) -> SamplingParams:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **asked}
        assert (await server.http.post(CHAT, json=body)).status_code == 200
        return server.engine.requests[0].params

    parsers = AnswerParsers(None, RECORDS["qwen3"])
    params = run(scenario, chat_template=TEMPLATE, parsers=parsers)
    assert params.reasoning == (TAGS if asked else None)


@pytest.mark.parametrize(
    ("tags", "opening", "expected"),
    [
        (TAGS, "<think>\n", True),
        (TAGS, "", False),
        (TAGS, "<think>\n\n</think>\n\n", None),
        (TAGS, "</think><think>", True),
        (IMPLIED, "", True),
        (IMPLIED, "</think>", None),
    ],
)
def test_the_prompt_says_whether_reasoning_is_open(tags, opening, expected) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    params = SamplingParams(grammar=GrammarSpec("json_object"), reasoning=tags)
    messages = [{"role": "user", "content": "</think>"}]
    request = TokenizeRequest(
        0, messages, params, template_kwargs={"opening": opening}, return_prompt_tail=True
    )
    found = answer(PromptEncoder(tokenizer), request)
    assert isinstance(found, GenerateRequest)
    left = found.params.reasoning
    assert (None if left is None else left.is_open) is expected


def test_a_prompt_that_is_no_chat_has_no_reasoning_before_its_form() -> None:
    params = SamplingParams(grammar=GrammarSpec("json_object"), reasoning=TAGS)
    found = answer(PromptEncoder(byte_level()), TokenizeRequest(0, "<think>", params))
    assert isinstance(found, GenerateRequest)
    assert found.params.reasoning is None


def test_replies_that_are_merged_lose_nothing() -> None:
    first = TextReply(5, "a", [1], num_prompt_tokens=3, num_cached_tokens=2, prompt_tail="<think>",
                      prompt=PromptEcho([1, 2], "xy"))  # fmt: skip
    second = TextReply(5, "b", [2], num_prompt_tokens=3, num_cached_tokens=2, finish_reason="stop",
                       num_completion_tokens=2, stop_string="c")  # fmt: skip
    found = msgspec.structs.asdict(merged(first, second))
    for name, value in msgspec.structs.asdict(first).items():
        other = getattr(second, name)
        either = other if value in (None, [], "", 0) else value
        assert found[name] == (value + other if name in ("text", "token_ids") else either), name
    assert json.dumps(found["token_ids"]) == "[1, 2]"
