"""An answer through reasoning and tool parsers; parsers that break lose nothing."""

from typing import Any

import pytest

from minisgl.parsing import (
    ContentText,
    ParserContext,
    ParserEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.parsing.answer import AnswerParser
from minisgl.parsing.families import think
from minisgl.parsing.tools_json import HermesCalls

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CONTEXT = ParserContext(new_id=lambda: "id")


def run(parser: AnswerParser, *pieces: str) -> list[ParserEvent]:
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def content(events: list[ParserEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentText))


def test_without_parsers_text_is_content() -> None:
    parser = AnswerParser(None, None)
    assert run(parser, "a", "", "b ") == [ContentText("a"), ContentText("b ")]
    assert parser.num_tool_calls == 0


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    parser = AnswerParser(think(CONTEXT), HermesCalls(CONTEXT))
    assert run(parser, f"<think>{CALL}</think>x{CALL}") == [
        ReasoningText(CALL),
        ContentText("x"),
        ToolCallStart(0, "id", "f"),
        ToolCallArguments(0, "{}"),
    ]
    assert parser.num_tool_calls == 1


def test_one_call_where_parallel_calls_are_forbidden() -> None:
    parser = AnswerParser(None, HermesCalls(CONTEXT), parallel=False)
    events = run(parser, CALL, CALL, "x")
    assert [event for event in events if isinstance(event, ToolCallStart)] == [
        ToolCallStart(0, "id", "f")
    ]
    assert all(event.index == 0 for event in events if isinstance(event, ToolCallArguments))
    assert content(events) == "x"
    assert parser.num_tool_calls == 1


@pytest.mark.parametrize(
    ("pieces", "is_half"),
    [
        (["x"], False),
        ([CALL], False),
        ([CALL, CALL], False),
        (['<tool_call>{"name": "g", "arguments": {"a'], True),
        ([CALL, '<tool_call>{"name": "g", "arguments": {"a": 1'], True),
        (['<tool_call>{"name": "g", "arguments": {"a": oh', CALL], True),
        (['<tool_call>{"na'], False),
    ],
)
def test_calls_that_broke_off_are_known_at_the_end(pieces, is_half) -> None:
    parser = AnswerParser(None, HermesCalls(CONTEXT))
    run(parser, *pieces)
    assert parser.has_half_calls is is_half


class Broken:
    """A parser that holds text back and then raises."""

    def __init__(self, raises_at: int, first: list[Any] | None = None) -> None:
        self._left = raises_at
        self._first = first

    def feed(self, text: str) -> list[ParserEvent]:
        self._left -= 1
        if self._left == 0:
            raise ValueError
        first, self._first = self._first or [], None
        return first

    def finish(self) -> list[ParserEvent]:
        raise ValueError


@pytest.mark.parametrize("raises_at", [1, 2, 3, 99])
@pytest.mark.parametrize("first", [[], [ContentText("a")]])
def test_a_parser_that_raises_loses_no_text(raises_at, first, caplog) -> None:
    for parser in (
        AnswerParser(None, Broken(raises_at, list(first))),
        AnswerParser(Broken(raises_at, list(first)), None),
    ):
        assert content(run(parser, "ab", "cd", "ef")) == "abcdef"
    assert "Traceback" in caplog.text


def test_what_followed_the_last_event_is_not_lost_either() -> None:
    started = [ToolCallStart(0, "id", "f")]
    parser = AnswerParser(None, Broken(3, started))
    assert content(run(parser, "call", "b", "c")) == "bc"
