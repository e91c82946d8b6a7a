"""Reasoning between two tags at the beginning of an answer, as in ``<think>...</think>``."""

from typing import Literal

from minisgl.parsing.interface import ParserContext, ReasoningText
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.pulled import PulledParser, Steps
from minisgl.request import ReasoningTags

Opening = Literal["open", "possible", "over"]
"""Whether a prompt has begun the reasoning, leaves that to the answer, or has closed it."""


def opening(prompt_tail: str, tags: ReasoningTags) -> Opening:
    """Return how the end of a prompt leaves the reasoning."""
    opened, closed = prompt_tail.rfind(tags.begin), prompt_tail.rfind(tags.end)
    if opened > closed or (tags.implied and closed < 0):
        return "open"
    return "over" if closed >= 0 else "possible"


class TaggedReasoning(PulledParser):
    """Tells reasoning from content.

    Reasoning begins with the opening tag, at the beginning of the answer or in the prompt, where
    templates put it. Line breaks beside the tags are theirs.

    Args:
        context: of the request.
        begin, end: the tags.
        implied: the answer begins with reasoning even without an opening tag, unless the prompt has
            a closing one.
    """

    def __init__(
        self, context: ParserContext, *, begin: str, end: str, implied: bool = False
    ) -> None:
        self._begin, self._end = begin, end
        tags = ReasoningTags(begin, end, implied=implied)
        self._opening = opening(context.prompt_tail, tags)
        self._is_constrained = context.constrained
        self._breaks = ""
        super().__init__(context)

    def _read(self) -> Steps[None]:
        if self._is_constrained and self._opening == "over":
            yield from self._content_until()
            return
        lead = yield from self._lead()
        if self._opening != "open" and not lead:
            yield from self._content_until()
            return
        self._think_break = True
        while self._up_to((self._end,), self._think) is None:
            if not (yield from self._more()):
                self._think(self._text)
                self._text = ""
                self._put(ReasoningText, self._breaks)
                return
        if not self._is_constrained:
            yield from self._without_breaks()
        yield from self._content_until()

    def _lead(self) -> Steps[bool]:
        """Consume white space and the opening tag, if the text begins with them."""
        while True:
            text = self._text.lstrip(SPACE)
            if text.startswith(self._begin):
                self._text = text[len(self._begin) :]
                return True
            if not self._begin.startswith(text) or not (yield from self._more()):
                return False

    def _without_breaks(self) -> Steps[None]:
        """Drop the line breaks behind the closing tag."""
        while not (text := self._text.lstrip("\r\n")):
            self._text = ""
            if not (yield from self._more()):
                return
        self._text = text

    def _think(self, text: str) -> None:
        """Pass reasoning on, but for line breaks at its beginning and, so far, at its end."""
        if self._think_break:
            text = text.lstrip("\r\n")
            self._think_break = not text
        text = self._breaks + text
        core = text.rstrip("\r\n")
        self._breaks = text[len(core) :]
        self._put(ReasoningText, core)
