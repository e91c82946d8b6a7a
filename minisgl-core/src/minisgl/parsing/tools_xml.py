"""Tool calls that Qwen3-Coder writes as tags, with a value between them for each parameter."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from minisgl.parsing.interface import ParserContext
from minisgl.parsing.pulled import PulledParser, Steps

_BEGIN: Final = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>")
_MAX_TAG: Final = 400


class Qwen3CoderCalls(PulledParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.

    The outer tags may be missing. A value is text where the tool's schema says string, or says
    nothing and the value is no JSON; else it is JSON. A parameter comes when it is complete.
    """

    CALL: Final = "<tool_call>"
    FUNCTION: Final = "<function="

    def __init__(self, context: ParserContext) -> None:
        self._properties = {
            str(tool["function"]["name"]): _properties(tool["function"]) for tool in context.tools
        }
        super().__init__(context)

    def _read(self) -> Steps[None]:
        while (mark := (yield from self._content_until(self.CALL, self.FUNCTION))) is not None:
            raw = ""
            if mark == self.CALL:
                raw = mark
            else:
                self._text = self.FUNCTION + self._text
            if (yield from self._function(raw)):
                yield from self._skip("</tool_call>")

    def _function(self, raw: str) -> Steps[bool]:
        """Read one function; return whether it was complete."""
        begin = yield from self._tag(_BEGIN, self.FUNCTION)
        if begin is None:
            if not raw:  # the mark is consumed, or it would be found again
                raw, self._text = self.FUNCTION, self._text[len(self.FUNCTION) :]
            self._say(raw)
            return False
        self._text = self._text[begin.end() :]
        name = begin[1]
        if not self._may_call(name):
            self._say(raw + begin[0])
            return False
        index = self._begin_call(name)
        opening = "{"
        while (parameter := (yield from self._tag(_PARAMETER, "<parameter="))) is not None:
            value = yield from self._value(parameter.end())
            if value is None:
                return False
            text = _as_json(value, self._properties.get(name, {}).get(parameter[1]))
            key = json.dumps(parameter[1], ensure_ascii=False)
            self._arguments(index, [f"{opening}{key}: {text}"])
            opening = ", "
        if not (yield from self._skip("</function>")):
            return False
        self._arguments(index, ["}" if opening == ", " else "{}"])
        return True

    def _tag(self, pattern: re.Pattern[str], begin: str) -> Steps[re.Match[str] | None]:
        """Wait for an opening tag; consume nothing."""
        while True:
            found = pattern.match(self._text, 0, _MAX_TAG)
            text = self._text[:_MAX_TAG].lstrip()
            may_come = begin.startswith(text) or (text.startswith(begin) and ">" not in text)
            if found is not None or not may_come or len(self._text) >= _MAX_TAG:
                return found
            if not (yield from self._more()):
                return None

    def _value(self, start: int) -> Steps[str | None]:
        """Wait for the end of a value and consume it, with its tags; ``None`` if there is no end.

        The tag of the next parameter, or the end of the function, ends a value, too.
        """
        searched = start
        while True:
            ends = [
                (at, end)
                for end in ("</parameter>", "<parameter=", "</function>")
                if (at := self._text.find(end, max(start, searched - 12))) >= 0
            ]
            if ends:
                at, end = min(ends)
                value = self._text[start:at]
                self._text = self._text[at + len(end) if end == "</parameter>" else at :]
                return value.removeprefix("\n").removesuffix("\n")
            searched = len(self._text)
            if not (yield from self._more()):
                return None


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _as_json(value: str, schema: Any) -> str:
    """Return the JSON text of a parameter's value."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds != ["string"]:
        word = value.strip()
        try:
            parsed = json.loads(_LITERALS.get(word, word), parse_constant=_refuse)
        except (ValueError, RecursionError):
            parsed = value
        else:
            if not ("string" in kinds and parsed is not None):
                return json.dumps(parsed, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


_LITERALS: Final = {"True": "true", "False": "false", "None": "null"}
"""Python's words, which the model was trained with."""


def _refuse(name: str) -> object:
    raise ValueError(name)
