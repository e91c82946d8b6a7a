"""What reads a model's text into content, reasoning and tool calls: events and the parser protocol.

How the API server uses it:

1. Once, at the start: ``parsers = select_parsers(host, settings, template)`` (of
   ``minisgl.plugins.parsers``) with the chat template's text, which the tokenizer worker reports.
2. For a request: ``plan = plan_tools(tools, tool_choice, parallel=...)`` (of
   ``minisgl.parsing.tool_choice``) validates; its errors name the field. ``plan.grammar()`` is a
   ``GrammarSpec`` for ``required`` and named choices, else ``None``; ``plan.template_tools``
   goes into ``TokenizeRequest.tools``.
3. ``parsers.check(plan)`` refuses what this server cannot read. ``parsers.special_tokens(plan)``
   says that ``skip_special_tokens`` must be off, ``parsers.needs_prompt_tail`` that
   ``TokenizeRequest.return_prompt_tail`` must be on.
4. For each answer, when its first reply is there: ``parser = parsers.create(plan,
   prompt_tail=reply.prompt_tail, constrained=params.grammar is not None)``. Then
   ``parser.feed(text)`` for each increment and ``parser.finish()`` at its end, which never raise;
   ``parser.num_tool_calls`` decides about ``finish_reason``.

``feed`` returns events as early as they are certain, in order; texts and fragments of the same kind
concatenate. Whatever a parser cannot read comes out as content. Parsers take text in any cut: the
concatenated events never depend on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer's ``content``; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the answer's reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins.

    Attributes:
        index: from 0, in the order of the answer.
        id: unique, such as ``call_...``.
        name: of the function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's ``arguments``, after its ``ToolCallStart``; never empty.

    The concatenated fragments of a complete call are one JSON object.
    """

    index: int
    fragment: str


ParserEvent = ContentText | ReasoningText | ToolCallStart | ToolCallArguments


def new_call_id() -> str:
    """Return a fresh id of a tool call, as OpenAI's look."""
    return f"call_{uuid4().hex}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserContext:
    """What a parser may know of its request.

    Attributes:
        tools: that the request offers, each ``{"type": "function", "function": {...}}``.
        forbidden: names of functions that the request has and the answer may not call: calls of
            them are content.
        constrained: a grammar rules the answer behind its reasoning: that is over where its closing
            tag ends, and all that follows is content.
        prompt_tail: the end of the rendered prompt, behind the last text that a client wrote: a
            reasoning parser sees there whether the template has opened ``<think>`` already.
        new_id: makes the id of a tool call.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    forbidden: frozenset[str] = frozenset()
    constrained: bool = False
    prompt_tail: str = ""
    new_id: Callable[[], str] = field(default=new_call_id)


class TextParser(Protocol):
    """Reads one answer, piece by piece.

    A reasoning parser returns ``ReasoningText`` and ``ContentText``; a tool parser gets that
    content and returns ``ContentText``, ``ToolCallStart`` and ``ToolCallArguments``. An exception
    costs nothing but the parsing: the text goes on as content.
    """

    def feed(self, text: str) -> list[ParserEvent]:
        """Read the next piece, of any length; return what is certain by now."""

    def finish(self) -> list[ParserEvent]:
        """Return what was held back: nothing follows. Called once."""
