"""One answer through its parsers: reasoning first, then tool calls."""

import logging

import msgspec

from minisgl.errors import without_messages
from minisgl.parsing.interface import (
    ContentText,
    ParserEvent,
    TextParser,
    ToolCallArguments,
    ToolCallStart,
)

logger = logging.getLogger(__name__)
logger.addFilter(without_messages)


class AnswerParser:
    """Reads one answer.

    Args:
        reasoning: tells reasoning from content, if the model reasons.
        tools: finds tool calls in the content, if there are tools.
        parallel: whether the answer may hold several calls; further ones are left out, as OpenAI
            documents for ``parallel_tool_calls``.

    Attributes:
        num_tool_calls: calls that have begun.
        has_half_calls: whether one has ended before its arguments were complete; known at the end.
    """

    def __init__(
        self, reasoning: TextParser | None, tools: TextParser | None, *, parallel: bool = True
    ) -> None:
        self._reasoning = _Guarded(reasoning)
        self._tools = _Guarded(tools)
        self._parallel = parallel
        self._fragments: list[str] = []
        self.num_tool_calls = 0
        self.has_half_calls = False

    def feed(self, text: str) -> list[ParserEvent]:
        """Read the next piece; return what is certain by now. Never raises."""
        return self._admitted(self._through_tools(self._reasoning.feed(text)))

    def finish(self) -> list[ParserEvent]:
        """Return what was held back: nothing follows. Never raises."""
        events = self._through_tools(self._reasoning.finish())
        admitted = self._admitted(events + self._tools.finish())
        self._end_call()
        return admitted

    def _through_tools(self, events: list[ParserEvent]) -> list[ParserEvent]:
        out: list[ParserEvent] = []
        for event in events:
            out += self._tools.feed(event.text) if isinstance(event, ContentText) else [event]
        return out

    def _admitted(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """Count calls, and leave out those that may not be there."""
        if not self._parallel:
            events = [
                event
                for event in events
                if not (isinstance(event, ToolCallStart | ToolCallArguments) and event.index > 0)
            ]
        for event in events:
            if isinstance(event, ToolCallStart):
                self._end_call()
                self.num_tool_calls += 1
            elif isinstance(event, ToolCallArguments):
                self._fragments.append(event.fragment)
        return events

    def _end_call(self) -> None:
        """Note whether the arguments of the last call, if there is one, are complete."""
        if not self.num_tool_calls:
            return
        try:
            msgspec.json.decode("".join(self._fragments))
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            self.has_half_calls = True
        self._fragments.clear()


class _Guarded:
    """A parser, or none, whose exceptions end its work on this answer: the rest is content.

    What it had read and not returned is not lost either. That is known exactly as long as it has
    returned nothing but content; later it is all that came after its last event.
    """

    def __init__(self, parser: TextParser | None) -> None:
        self._parser = parser
        self._unreturned = ""
        self._is_exact = True

    def feed(self, text: str) -> list[ParserEvent]:
        """Return the parser's events, or the text as content."""
        if self._parser is None:
            return [ContentText(text)] if text else []
        self._unreturned += text
        try:
            events = list(self._parser.feed(text))
        except Exception:
            logger.exception("a parser failed; the rest of the answer is content")
            return self._give_up()
        self._note(events)
        return events

    def finish(self) -> list[ParserEvent]:
        """Return what the parser held back."""
        if self._parser is None:
            return []
        try:
            return list(self._parser.finish())
        except Exception:
            logger.exception("a parser failed at the end of an answer")
            return self._give_up()

    def _note(self, events: list[ParserEvent]) -> None:
        content = "".join(e.text for e in events if isinstance(e, ContentText))
        self._is_exact &= all(isinstance(event, ContentText) for event in events)
        if self._is_exact and self._unreturned.startswith(content):
            self._unreturned = self._unreturned[len(content) :]
        elif events:
            self._unreturned = ""

    def _give_up(self) -> list[ParserEvent]:
        self._parser = None
        return [ContentText(self._unreturned)] if self._unreturned else []
