"""JSON that arrives in pieces: is it valid so far, where does it end, which call does it write?

Read character by character, so that nothing depends on how text is cut. Two faults that models
make are mended, since everything else about such a value is clear: raw control characters in
strings, and backslashes before characters that JSON does not escape.
"""

import json
import re
from collections.abc import Callable
from typing import Final

SPACE: Final = " \t\r\n"
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LITERALS: Final = frozenset({"true", "false", "null"})
_ESCAPED: Final = '"\\/bfnrt'
_HEX: Final = "0123456789abcdefABCDEF"

MAX_DEPTH: Final = 200
"""Levels of nesting; many a client's parser takes no more than a thousand."""

MAX_WORD: Final = 400
"""Characters of a number."""


class JsonFault(Exception):  # noqa: N818 - no failure of ours: the model's text is no JSON
    """The text cannot be the beginning of a JSON value."""


class JsonScanner:
    """Reads one JSON object or array.

    Attributes:
        depth: how many objects and arrays are open.
        expect: what may come next: ``value``, ``value or ]``, ``key``, ``key or }``, ``:``,
            ``comma``, or ``string`` within one.
        done: whether the value is complete.
        again: whether the last character ended a number or a word, and was not read itself.
    """

    def __init__(self) -> None:
        self.expect = "value"
        self.done = False
        self.again = False
        self._stack: list[str] = []
        self._word = ""
        self._escape = ""
        self._is_key = False

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._stack)

    @property
    def held(self) -> str:
        """What has been read of a number, a word or an escape and not been returned yet."""
        return self._word + self._escape

    def feed(self, character: str) -> str:
        """Read a character; return what it adds to the value's text.

        Numbers, words and escapes come when they are complete. If ``again`` is set afterwards,
        the same character must be fed once more.

        Raises:
            JsonFault: the character cannot stand here.
        """
        self.again = False
        if self.expect == "string":
            return self._in_string(character)
        if self._word:
            return self._in_word(character)
        if character in SPACE:
            return character if self._stack else ""
        return self._token(character)

    def _token(self, character: str) -> str:
        expect = self.expect
        if character == "]" and expect == "value or ]":
            return self._close(character)
        if expect in ("value", "value or ]"):
            return self._begin_value(character)
        if character == "}" and expect == "key or }":
            return self._close(character)
        if character == '"' and expect in ("key", "key or }"):
            self.expect, self._is_key = "string", True
            return character
        if character == ":" and expect == ":":
            self.expect = "value"
            return character
        if expect == "comma" and self._stack:
            if character != ",":
                return self._close(character)
            self.expect = "key" if self._stack[-1] == "}" else "value"
            return character
        raise JsonFault

    def _begin_value(self, character: str) -> str:
        if character in "{[":
            if self.depth == MAX_DEPTH:
                raise JsonFault
            self._stack.append("}" if character == "{" else "]")
            self.expect = "key or }" if character == "{" else "value or ]"
            return character
        if not self._stack:
            raise JsonFault
        if character == '"':
            self.expect, self._is_key = "string", False
            return character
        if character.isascii() and (character.isalnum() or character == "-"):
            self._word = character
            return ""
        raise JsonFault

    def _close(self, character: str) -> str:
        if self._stack[-1] != character:
            raise JsonFault
        self._stack.pop()
        self.expect = "comma"
        self.done = not self._stack
        return character

    def _in_word(self, character: str) -> str:
        """Read on in a number or a literal, which ends where something else begins."""
        word = self._word
        if character.isascii() and (character.isalnum() or character in "+-."):
            self._word += character
            if len(word) == MAX_WORD:
                raise JsonFault
            return ""
        if word not in _LITERALS and not _NUMBER.fullmatch(word):
            raise JsonFault
        self._word = ""
        self.expect = "comma"
        self.again = True
        return word

    def _in_string(self, character: str) -> str:
        if self._escape:
            return self._in_escape(character)
        if character == "\\":
            self._escape = character
            return ""
        if character == '"':
            self.expect = ":" if self._is_key else "comma"
            return character
        return json.dumps(character)[1:-1] if character < " " else character

    def _in_escape(self, character: str) -> str:
        escape, self._escape = self._escape + character, ""
        if escape[1] == "u":
            if len(escape) > 2 and character not in _HEX:
                return "\\\\" + escape[1:-1] + self._in_string(character)
            if len(escape) < 6:
                self._escape = escape
                return ""
            return escape
        if escape[1] in _ESCAPED:
            return escape
        # As in a regular expression: a backslash that stands for itself.
        return "\\\\" + self._in_string(character)


class CallReader:
    """Reads one call, ``{"name": ..., "arguments": {...}}``, and streams its arguments.

    ``parameters`` is another word for ``arguments``, and ``function`` may hold the name, or an
    object with the two. Other keys are skipped. Arguments that come before the name wait for it.
    Arguments may be JSON text in a string; ``null`` and missing ones are ``{}``.

    Args:
        accepts: whether there may be a function of that name.

    Attributes:
        name: of the function, as soon as it is known.
        has_arguments: whether they have been returned to their end.
        done: whether the object is complete.
    """

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self._accepts = accepts
        self._scanner = JsonScanner()
        self._level = 1  # of the object whose keys are read
        self._mode = "open"
        self._key = ""
        self._part = ""
        self._value: list[str] = []
        self._early: str | None = None
        self.name: str | None = None
        self.has_arguments = False
        self.done = False

    def feed(self, character: str) -> str:
        """Read a character; return what it adds to the arguments of the call ``name``.

        Raises:
            JsonFault: this is no call, or its JSON is broken.
        """
        out = self._read(self._scanner.feed(character))
        while self._scanner.again:
            out += self._read(self._scanner.feed(character))
        return out

    def rest(self) -> str:
        """Return what was read of the arguments and held back: nothing follows."""
        return self._scanner.held if self._mode == "value" and self._streams else ""

    @property
    def _streams(self) -> bool:
        """Whether the value that is read is the arguments of a call that is certain."""
        is_arguments = self._key in ("arguments", "parameters")
        return is_arguments and self.name is not None and self._value[:1] == ["{"]

    def _read(self, added: str) -> str:
        """Follow the scanner, which has just added this."""
        has_ended = self._scanner.depth < self._level
        if self._mode == "open":
            if added.strip(SPACE) not in ("", "{"):
                raise JsonFault
            self._mode = "key" if added == "{" else "open"
        elif self._mode == "key":
            if has_ended:
                return self._close()
            self._part = (self._part + added).lstrip(SPACE)
            if self._scanner.expect == ":":
                self._key, self._part, self._mode = json.loads(self._part), "", ":"
        elif self._mode == ":":
            self._mode = "value" if added == ":" else ":"
        elif self._mode == "value":
            return self._in_value(added)
        elif has_ended:
            return self._close()
        elif added == ",":
            self._part, self._mode = "", "key"
        return ""

    def _in_value(self, added: str) -> str:
        if not self._value:
            added = added.lstrip(SPACE)
            if self._key == "function" and added == "{" and self._level == 1:
                self._level, self._mode = 2, "key"
                return ""
        if added and not (self._value and self._streams):  # what is sent need not be kept
            self._value.append(added)
        streams = self._streams
        if self._scanner.depth > self._level or self._scanner.expect != "comma":
            return self._once(added) if streams else ""
        text, self._value, self._mode = "".join(self._value), [], "after"
        if streams:
            added = self._once(added)
            self.has_arguments = True
            return added
        if self._key in ("name", "function"):
            return self._take_name(_loads(text))
        return self._take_arguments(text) if self._key in ("arguments", "parameters") else ""

    def _once(self, added: str) -> str:
        """Return ``added``, unless arguments have come before."""
        if self.has_arguments:
            raise JsonFault
        return added

    def _take_name(self, name: object) -> str:
        if self.name is not None or not isinstance(name, str) or not self._accepts(name):
            raise JsonFault
        self.name = _utf8(name)
        early, self._early = self._early, None
        self.has_arguments = early is not None
        return early or ""

    def _take_arguments(self, text: str) -> str:
        """Take arguments as a whole: before the name, or as text in a string."""
        value = _loads(text)
        if isinstance(value, str):
            text = _utf8(value).strip() or "{}"
            value = _loads(text)
        if value is None:
            text, value = "{}", {}
        if not isinstance(value, dict) or self.has_arguments or self._early is not None:
            raise JsonFault
        if self.name is None:
            self._early = text
            return ""
        self.has_arguments = True
        return text

    def _close(self) -> str:
        """End the object: the inner one of ``function``, or the call."""
        self._mode = "after"
        if self._level == 2:
            self._level = 1
            return ""
        self.done = True
        if self.name is None:
            raise JsonFault
        if self.has_arguments:
            return ""
        self.has_arguments = True
        return "{}"


def _loads(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise JsonFault from error


def _refuse(name: str) -> object:
    raise ValueError(name)


def _utf8(text: str) -> str:
    """Return ``text`` if it can be sent: lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JsonFault from error
    return text
