"""Tool calls that models write as JSON: Hermes and Qwen, Llama 3, Mistral."""

import dataclasses
import re
import secrets
import string
from typing import Final

from minisgl.parsing.interface import ParserContext
from minisgl.parsing.pulled import PulledParser, Steps

_MISTRAL_ID: Final = string.ascii_letters + string.digits


class HermesCalls(PulledParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of times.

    An end tag may be missing, and a brace too many before it does no harm.
    """

    BEGIN: Final = "<tool_call>"
    END: Final = "</tool_call>"

    def _read(self) -> Steps[None]:
        while (yield from self._content_until(self.BEGIN)) is not None:
            if (yield from self._call(self.BEGIN, self._may_call)):
                yield from self._end()

    def _end(self) -> Steps[None]:
        while True:
            rest = self._text.lstrip("} \t\r\n")
            if rest.startswith(self.END):
                self._text = rest[len(self.END) :]
                return
            if not self.END.startswith(rest):
                return
            if not (yield from self._more()):
                self._text = ""
                return


class Llama3Calls(PulledParser):
    """``{"name": ..., "parameters": {...}}`` and nothing before it, several of them with ``;``.

    ``<|python_tag|>`` may stand before a call. JSON without the name of one of the request's tools
    is content.
    """

    TAG: Final = "<|python_tag|>"

    def _read(self) -> Steps[None]:
        raw = ""
        if (yield from self._peek()) != "{":
            if (yield from self._content_until(self.TAG)) is None:
                return
            raw = self.TAG
        while (yield from self._call(raw, self._names.__contains__)):
            raw = yield from self._skip(";")
            raw += yield from self._skip(self.TAG)
            if not raw.endswith(self.TAG) and (yield from self._peek()) != "{":
                self._say(raw)
                break
        yield from self._content_until()


class MistralCalls(PulledParser):
    """``[TOOL_CALLS]`` and a list of ``{"name": ..., "arguments": {...}}``.

    Newer models write the name and the arguments as such behind the mark, with ``[ARGS]`` between
    them and perhaps ``[CALL_ID]`` and an id before that. Their templates take ids of nine letters
    and digits only.
    """

    BEGIN: Final = "[TOOL_CALLS]"
    _HEADER: Final = re.compile(
        r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
    )
    _MAX_HEADER: Final = 400

    def __init__(self, context: ParserContext) -> None:
        super().__init__(dataclasses.replace(context, new_id=_mistral_id))

    def _read(self) -> Steps[None]:
        while (yield from self._content_until(self.BEGIN)) is not None:
            if bracket := (yield from self._skip("[")):
                yield from self._call_list(f"{self.BEGIN}{bracket}", self._may_call)
            else:
                yield from self._named()

    def _named(self) -> Steps[None]:
        """Read a name, and the arguments behind it."""
        limit = self._MAX_HEADER
        while "{" not in self._text[:limit] and len(self._text) < limit:
            # Another mark ends the search: it can be no part of a header.
            if self.BEGIN in self._text or not (yield from self._more()):
                break
        header = self._HEADER.match(self._text, 0, limit)
        if header is None:
            self._say(self.BEGIN)
            return
        self._text = self._text[header.end() :]
        if not self._may_call(header[1]):
            self._say(f"{self.BEGIN}{header[0]}")
            return
        yield from self._argument_object(f"{self.BEGIN}{header[0]}", header[1], header[2])


def _mistral_id() -> str:
    return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))
