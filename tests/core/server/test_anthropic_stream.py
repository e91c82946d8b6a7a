"""The stream of ``/v1/messages``, line by line as Anthropic documents it.

How a text is cut into deltas is open: those that follow one another are put together here.
"""

import json
from typing import Any

import pytest

from minisgl.plugins import builtin
from minisgl.plugins.parsers import AnswerParsers
from support.http_asks import run
from support.in_process_engine import MODEL, Served

MESSAGES = "/v1/messages"
TEMPLATE = "{{ messages[-1]['content'] }}{{ eos_token }}"
PARSERS = AnswerParsers(
    next(record for record in builtin.minisgl_tool_parsers() if record.name == "hermes"),
    next(record for record in builtin.minisgl_reasoning_parsers() if record.name == "qwen3"),
)
TOOLS = [{"name": "weather", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>'
THINKING: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
SIGNATURE = {"type": "signature_delta", "signature": ""}
TEXT = {"type": "text", "text": ""}

Block = tuple[dict[str, Any], list[dict[str, Any]]]
"""How a block begins, and what follows."""


def thinking(text: str) -> Block:
    return THINKING, [{"type": "thinking_delta", "thinking": text}, SIGNATURE]


def text(text: str) -> Block:
    return TEXT, [{"type": "text_delta", "text": text}]


def call(arguments: str) -> Block:
    start = {"type": "tool_use", "id": "call", "name": "weather", "input": {}}
    return start, [{"type": "input_json_delta", "partial_json": arguments}]


def whole_block(begins: dict[str, Any], deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The block of a whole message that a stream writes so."""
    kind, first = begins["type"], deltas[0]
    if kind == "tool_use":
        return {**begins, "input": json.loads(first["partial_json"])}
    return {**begins, kind: first[kind]}


def event(kind: str, **fields: Any) -> str:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n"


def put_together(stream: str) -> list[str]:
    """The events of a stream, where each block has one delta of a kind, and calls one id."""
    events: list[tuple[str, dict[str, Any]]] = []
    for lines in stream.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        kind, fields = name.removeprefix("event: "), json.loads(data.removeprefix("data: "))
        assert fields.pop("type") == kind
        if "id" in fields.get("content_block", {}):
            fields["content_block"]["id"] = "call"
        last = events[-1][1] if events else {}
        delta, before = fields.get("delta", {}), last.get("delta", {})
        if delta.get("type") is not None and delta["type"] == before.get("type"):
            [key] = delta.keys() - {"type"}
            before[key] += delta[key]
            continue
        events.append((kind, fields))
    return [event(kind, **fields) for kind, fields in events]


def expected(blocks: list[Block], reason: str, sequence: str | None, end: dict[str, Any]) -> Any:
    start = {**end, "output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
    message = {
        "id": "msg_r", "type": "message", "role": "assistant", "model": MODEL, "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": start,
    }  # fmt: skip
    between = [
        line
        for index, (begins, deltas) in enumerate(blocks)
        for line in (
            event("content_block_start", index=index, content_block=begins),
            *(event("content_block_delta", index=index, delta=delta) for delta in deltas),
            event("content_block_stop", index=index),
        )
    ]
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    return [
        event("message_start", message=message),
        event("ping"),
        *between,
        event("message_delta", delta=delta, usage=end),
        event("message_stop"),
    ]


@pytest.mark.parametrize(
    ("said", "fields", "blocks", "reason", "sequence"),
    [
        ("Hello.", {}, [text("Hello.")], "end_turn", None),
        ("Hello.", {"max_tokens": 3}, [text("Hell")], "max_tokens", None),
        ("Hello.", {"stop_sequences": ["lo"]}, [text("Hel")], "stop_sequence", "lo"),
        ("<think>\nhm", {}, [thinking("hm")], "end_turn", None),
        ("<think>hm</think>ja", {"max_tokens": 8}, [thinking("h")], "max_tokens", None),
        ("<think>\nhm\n</think>\n\nja", {}, [thinking("hm"), text("ja")], "end_turn", None),
        (CALL, {"tools": TOOLS}, [call('{"city": "Zürich 😀"}')], "tool_use", None),
        (
            f"<think>\nhm\n</think>\n\nI look.\n{CALL}\nDone.",
            {"tools": TOOLS},
            [thinking("hm"), text("I look."), call('{"city": "Zürich 😀"}'), text("\nDone.")],
            "tool_use",
            None,
        ),
    ],
    ids=range(8),
)
def test_a_stream_is_line_by_line_what_anthropic_documents(
    said, fields, blocks, reason, sequence
) -> None:
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 600, **fields}

    async def scenario(server: Served) -> tuple[Any, Any, int]:
        headers = {"X-Request-Id": "r"}
        ask = server.http.post
        streamed = await ask(MESSAGES, json={**body, "stream": True}, headers=headers)
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        whole = (await ask(MESSAGES, json=body, headers=headers)).json()
        asked = {name: value for name, value in body.items() if name in {"messages", "tools"}}
        count = (await ask(f"{MESSAGES}/count_tokens", json=asked)).json()["input_tokens"]
        return streamed.text, whole, count

    stream, whole, num_input = run(scenario, chat_template=TEMPLATE, parsers=PARSERS)
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_input
    assert usage["cache_read_input_tokens"] > 0  # known when the stream begins
    assert (usage["output_tokens_details"]["thinking_tokens"] > 0) == said.startswith("<think>")
    assert put_together(stream) == expected(blocks, reason, sequence, usage)
    for block in whole["content"]:
        if "id" in block:
            block["id"] = "call"
    assert whole["content"] == [whole_block(*block) for block in blocks]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
