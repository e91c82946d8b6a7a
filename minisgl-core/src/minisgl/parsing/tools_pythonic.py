"""Tool calls that Llama 3.2 and 4 write as Python: ``[weather(city="Zürich"), time()]``."""

import ast
import json
import re
from typing import Any, Final

from minisgl.parsing.interface import ParserContext
from minisgl.parsing.json_text import MAX_DEPTH
from minisgl.parsing.pulled import PulledParser, Steps

_NAME: Final = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(")
_NAME_BEGINS: Final = re.compile(r"\s*(?:[A-Za-z_][\w.]*\s*)?")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][\w.]*")
_MAX_NAME: Final = 300
_WORDS: Final = {"true": True, "false": False, "null": None}
"""JSON's words, which models mix in."""
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}


class PythonicCalls(PulledParser):
    """A list of calls with literal keyword arguments, and nothing before it.

    ``<|python_start|>`` and ``<|python_end|>`` may stand around it. A call comes when it is
    complete. Calls of what is none of the request's tools are content. Names that Python could not
    write, such as ``get-weather``, are read as they are.
    """

    BEGIN: Final = "<|python_start|>"
    END: Final = "<|python_end|>"

    def __init__(self, context: ParserContext) -> None:
        names = (str(tool["function"]["name"]) for tool in context.tools)
        self._others = [name for name in names if not _IDENTIFIER.fullmatch(name)]
        super().__init__(context)

    def _read(self) -> Steps[None]:
        raw = yield from self._skip(self.BEGIN)
        if bracket := (yield from self._skip("[")):
            raw += bracket
            while (yield from self._python_call(raw)):
                raw = yield from self._skip(",")
                ends = yield from self._skip("]")  # Python lets a list end with a comma
                if ends or not raw:
                    yield from self._skip(self.END)
                    break
        elif raw:
            self._say(raw)
        yield from self._content_until()

    def _python_call(self, raw: str) -> Steps[bool]:
        """Read a call; return whether it was one. What is none is content, with ``raw``."""
        end = yield from self._end_of_call()
        call = None if end is None else self._read_call(self._text[:end])
        if call is None or call[0] not in self._names:
            self._say(raw)
            return False
        self._text = self._text[end:]
        name, arguments = call
        self._arguments(self._begin_call(name), [json.dumps(arguments, ensure_ascii=False)])
        return True

    def _end_of_call(self) -> Steps[int | None]:
        """Wait for the parenthesis that ends a call, and return the place behind it."""
        while (seen := self._opened(self._text)) is None:
            if not self._may_begin(self._text) or not (yield from self._more()):
                return None
        brackets = _Brackets()
        while True:
            for at in range(seen, len(self._text)):
                if not brackets.feed(self._text[at]):
                    return None
                if not brackets.open:
                    return at + 1
            seen = len(self._text)
            if not (yield from self._more()):
                return None

    def _opened(self, text: str) -> int | None:
        """Return the place behind the parenthesis that opens a call, if that is there."""
        if (name := self._other_name(text)) is not None:
            return text.index("(", text.index(name) + len(name)) + 1
        found = _NAME.match(text, 0, _MAX_NAME)
        return None if found is None else found.end()

    def _other_name(self, text: str) -> str | None:
        """Return the name at the beginning of a call that Python could not write, if it is one."""
        core = text.lstrip()
        for name in self._others:
            if core.startswith(name) and core[len(name) :].lstrip().startswith("("):
                return name
        return None

    def _may_begin(self, text: str) -> bool:
        """Return whether more text can make a name with its parenthesis of this."""
        core = text.lstrip()
        if any(name.startswith(core) or core.rstrip() == name for name in self._others):
            return True
        begins = _NAME_BEGINS.match(text, 0, _MAX_NAME)
        return begins is not None and begins.end() == len(text)

    def _read_call(self, text: str) -> tuple[str, dict[str, Any]] | None:
        name = self._other_name(text)
        if name is None:
            return read_call(text)
        call = read_call(f"f{text.lstrip()[len(name) :]}")
        return None if call is None else (name, call[1])


class _Brackets:
    """Follows brackets and strings of Python, from within one parenthesis."""

    def __init__(self) -> None:
        self.open = [")"]
        self._quote = ""
        self._is_escaped = False

    def feed(self, character: str) -> bool:
        """Read a character; return whether the brackets still match."""
        if self._quote:
            if self._is_escaped or character == "\\":
                self._is_escaped = not self._is_escaped
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in _CLOSING:
            self.open.append(_CLOSING[character])
            return len(self.open) <= MAX_DEPTH
        elif character in ")]}":
            return self.open.pop() == character
        return True


def read_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a call with literal keyword arguments, if it is one."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                return None
            arguments[keyword.arg] = _literal(keyword.value)
        name = ast.unparse(call.func)
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, SyntaxError, RecursionError, MemoryError, OverflowError):
        return None
    return name, arguments


def _literal(node: ast.expr) -> Any:
    """Return the JSON value that an expression writes.

    Raises:
        ValueError: it writes none.
    """
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            if not all(isinstance(k, ast.Constant) and isinstance(k.value, str) for k in keys):
                raise ValueError("keys of objects are strings")
            return {
                ast.literal_eval(key): _literal(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    raise ValueError(f"{type(node).__name__} is no JSON value")
