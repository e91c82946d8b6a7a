"""The text of one answer as content, reasoning and tool calls, whole or piece by piece."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl.message import TextReply
from minisgl.parsing.answer import AnswerParser
from minisgl.parsing.interface import (
    ContentText,
    ParserEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.request import FinishReason
from minisgl.server.usage import Usage

TOOL_CALLS: Final = "tool_calls"
"""Finish reason of an answer that ended by itself and calls tools."""


CreateParser = Callable[[str], AnswerParser]
"""Makes the parser of one answer, given the end of its prompt."""


class ChoiceReader:
    """Reads one answer.

    Args:
        create: makes its parser; ``None`` takes all text as content.
        shows_reasoning: whether reasoning is part of the answer.
    """

    def __init__(self, create: CreateParser | None = None, *, shows_reasoning: bool = True) -> None:
        self._create = create
        self._shows_reasoning = shows_reasoning
        self._parser: AnswerParser | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every piece of text is content as it comes."""
        return self._create is None

    def read(self, reply: TextReply, usage: Usage) -> list[ParserEvent]:
        """Return what a reply adds to the answer; ``usage`` gets the tokens that are reasoning."""
        if self._create is None:
            return [ContentText(reply.text)] if reply.text else []
        if self._parser is None:
            self._parser = self._create(reply.prompt_tail)
        events = self._parser.feed(reply.text) if reply.text else []
        if reply.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        if _only_reasons(events):
            usage.num_reasoning_tokens += len(reply.token_ids)
        if self._shows_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningText)]

    def reason(self, reason: str) -> str:
        """Return why the answer ended: one that stopped by itself may call tools.

        One whose call a stop string has cut does not: nobody could make that call.
        """
        parser = self._parser
        calls = parser is not None and parser.num_tool_calls > 0 and not parser.has_half_calls
        return TOOL_CALLS if calls and reason == FinishReason.STOP else reason


@dataclass(slots=True)
class Call:
    """A tool call of an answer."""

    id: str
    name: str
    fragments: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """JSON text."""
        return "".join(self.fragments)


@dataclass(slots=True)
class ReadAnswer:
    """A whole answer, put together from events."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[ParserEvent]) -> None:
        """Take the next events."""
        for event in events:
            match event:
                case ContentText(text=text):
                    self.content.append(text)
                case ReasoningText(text=text):
                    self.reasoning.append(text)
                case ToolCallStart():
                    self.calls.append(Call(event.id, event.name))
                case ToolCallArguments(index=index, fragment=fragment):
                    self.calls[index].fragments.append(fragment)

    def message(self) -> dict[str, Any]:
        """Return OpenAI's message; reasoning has the names of SGLang and of vLLM."""
        text = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self.calls else None,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


def _only_reasons(events: Iterable[ParserEvent]) -> bool:
    """Return whether events are reasoning and nothing else."""
    kinds = {type(event) for event in events}
    return kinds == {ReasoningText}
