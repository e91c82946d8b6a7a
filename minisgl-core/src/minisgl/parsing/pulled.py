"""The base of core's parsers: a generator that reads text as if all of it were there.

``_read`` is written like a reader of a whole string. Where it needs more than has come it does
``yield from self._more()``, and goes on there with the next piece.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, TypeVar

from minisgl.parsing.interface import (
    ContentText,
    ParserContext,
    ParserEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.parsing.json_text import SPACE, CallReader, JsonFault, JsonScanner

ValueT = TypeVar("ValueT")
Steps = Generator[None, None, ValueT]
"""A reader that pauses while it waits for text, and returns a value."""


class PulledParser(ABC):
    """A parser whose ``_read`` consumes ``self._text`` and waits for more where it is short.

    White space on both sides of a tool call is part of the call's syntax and not of the content.

    Attributes:
        drops_half_calls: a call that breaks off before its name is known is no content: the text
            could be nothing but calls.
    """

    drops_half_calls: ClassVar[bool] = False

    def __init__(self, context: ParserContext) -> None:
        self._context = context
        self._names = frozenset(str(tool["function"]["name"]) for tool in context.tools)
        self._text = ""
        self._ended = False
        self._events: list[ParserEvent] = []
        self._space = ""
        self._num_calls = 0
        self._said_since_call = False
        self._steps = self._read()
        next(self._steps, None)

    def feed(self, text: str) -> list[ParserEvent]:
        """Read the next piece; return what is certain by now."""
        if text:
            self._text += text
            next(self._steps, None)
        return self._take()

    def finish(self) -> list[ParserEvent]:
        """Return what was held back: nothing follows."""
        self._ended = True
        next(self._steps, None)
        self._say(self._text)
        if self._num_calls == 0 or self._said_since_call:
            self._put(ContentText, self._space)
        self._text = self._space = ""
        return self._take()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read everything; what is left of ``self._text`` at the end is content."""

    def _may_call(self, name: str) -> bool:
        """Return whether a name may be one of a function; models also make some up."""
        return bool(name) and name not in self._context.forbidden

    # What readers are made of

    def _more(self) -> Steps[bool]:
        """Wait for text; return whether there was any."""
        if self._ended:
            return False
        before = len(self._text)
        yield
        return len(self._text) > before

    def _content_until(self, *marks: str) -> Steps[str | None]:
        """Pass content on until a mark, which is consumed; ``None`` if the text ends first."""
        while True:
            mark = self._up_to(marks, self._say)
            if mark is not None or not (yield from self._more()):
                return mark

    def _up_to(self, marks: Sequence[str], take: Callable[[str], None]) -> str | None:
        """Give ``take`` what comes before the first mark, as far as no mark can begin in it."""
        text = self._text
        found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            take(text[:at])
            self._text = text[at + len(mark) :]
            return mark
        cut = len(text) - max((open_length(text, mark) for mark in marks), default=0)
        take(text[:cut])
        self._text = text[cut:]
        return None

    def _peek(self) -> Steps[str]:
        """Return the next character that is no white space, or nothing at the end."""
        while not (text := self._text.lstrip(SPACE)):
            if not (yield from self._more()):
                return ""
        return text[0]

    def _skip(self, mark: str) -> Steps[str]:
        """Consume and return white space and ``mark``, if they come; else consume nothing."""
        while True:
            text = self._text.lstrip(SPACE)
            if text.startswith(mark):
                skipped = self._text[: len(self._text) - len(text) + len(mark)]
                self._text = text[len(mark) :]
                return skipped
            if not mark.startswith(text) or not (yield from self._more()):
                return ""

    def _call(self, raw: str, accepts: Callable[[str], bool]) -> Steps[bool]:
        """Read a call as JSON; return whether it was one.

        What is none goes out as content, with ``raw``, which has led to it; if the arguments have
        begun, from there on.
        """
        reader = CallReader(accepts)
        index: int | None = None
        while True:
            pieces: list[str] = []
            text, self._text = self._text, ""
            for at, character in enumerate(text):
                try:
                    out = reader.feed(character)
                except JsonFault:
                    self._text = text[at:]
                    self._arguments(index, pieces)
                    if not reader.has_arguments:
                        self._say(raw + text[:at] if index is None else reader.rest())
                    return reader.has_arguments
                if out and index is None:
                    assert reader.name is not None
                    index = self._begin_call(reader.name)
                pieces.append(out)
                if reader.done:
                    self._arguments(index, pieces)
                    self._text = text[at + 1 :]
                    return True
            self._arguments(index, pieces)
            if index is None:
                raw += text
            if not (yield from self._more()):
                if index is not None:
                    self._arguments(index, [reader.rest()])
                elif not self.drops_half_calls:
                    self._say(raw)
                return False

    def _argument_object(self, raw: str, name: str, call_id: str | None = None) -> Steps[bool]:
        """Read the arguments of a call whose name is known; return whether they are complete."""
        scanner = JsonScanner()
        if (yield from self._peek()) != "{":
            self._say(raw)
            return False
        index = self._begin_call(name, call_id)
        while True:
            pieces: list[str] = []
            text, self._text = self._text, ""
            for at, character in enumerate(text):
                try:
                    pieces.append(scanner.feed(character))
                    if scanner.again:
                        pieces.append(scanner.feed(character))
                except JsonFault:
                    self._arguments(index, pieces)
                    self._text = text[at:]
                    self._say(scanner.held)
                    return False
                if scanner.done:
                    self._arguments(index, pieces)
                    self._text = text[at + 1 :]
                    return True
            self._arguments(index, pieces)
            if not (yield from self._more()):
                self._arguments(index, [scanner.held])
                return False

    def _call_list(self, raw: str, accepts: Callable[[str], bool]) -> Steps[None]:
        """Read a list of calls behind its bracket, up to the bracket that ends it."""
        while (yield from self._call(raw, accepts)):
            if not (raw := (yield from self._skip(","))):
                yield from self._skip("]")
                return

    # Events

    def _say(self, text: str) -> None:
        """Pass content on, but for the white space at its end: a call may follow."""
        text = self._space + text
        core = text.rstrip(SPACE)
        self._space = text[len(core) :]
        if core:
            self._said_since_call = True
            self._put(ContentText, core)

    def _begin_call(self, name: str, call_id: str | None = None) -> int:
        index = self._num_calls
        self._num_calls += 1
        self._space = ""
        self._said_since_call = False
        self._events.append(ToolCallStart(index, call_id or self._context.new_id(), name))
        return index

    def _arguments(self, index: int | None, pieces: Sequence[str]) -> None:
        fragment = "".join(pieces)
        if index is not None and fragment:
            self._events.append(ToolCallArguments(index, fragment))

    def _put(self, kind: type[ContentText] | type[ReasoningText], text: str) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, ContentText | ReasoningText) and type(last) is kind:
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def _take(self) -> list[ParserEvent]:
        taken, self._events = self._events, []
        return taken


def open_length(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` that ``mark`` could begin with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
