"""Reads regular expressions as ECMA-262 and Python's ``re`` at once.

A class of characters is what both of them let through (``minisgl.structured.code_points``). What
one of them lacks, or reads in another way, is refused by name.
"""

import re
from dataclasses import dataclass
from typing import Final, NoReturn

from minisgl.structured.code_points import (
    ANY_BUT_LINE_ENDS,
    TEXT,
    Ranges,
    Readings,
    complement,
    escapes,
    intersection,
    of,
    union,
)

MAX_NESTING: Final = 100
"""Groups inside of one another."""

MAX_REPEAT: Final = 999_999
"""Greatest number in ``{1,5}``."""

_QUANTIFIER: Final = re.compile(r"([*+?])|\{(\d+)(,?)(\d*)\}")
_NO_MINIMUM: Final = re.compile(r"\{,\d*\}")
_PLAIN_GROUP: Final = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_CODE: Final = re.compile(
    r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})"
)
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_REFUSED_GROUPS: Final = (
    ("?=", "a look-ahead"), ("?!", "a look-ahead"), ("?<=", "a look-behind"),
    ("?<!", "a look-behind"), ("?P=", "a backreference"), ("?(", "a condition"),
    ("?>", "an atomic group"), ("?#", "a comment"), ("?", "a flag"),
)  # fmt: skip
_REFUSED_ESCAPES: Final = {
    **dict.fromkeys("bB", "a word boundary"),
    **dict.fromkeys("AZzG", "an anchor other than ^ and $"),
    **dict.fromkeys("pP", "a Unicode property"),
    **dict.fromkeys("123456789k", "a backreference"),
}


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set; ``source`` is how the pattern says it."""

    ranges: Ranges
    source: str


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``."""

    kind: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One item after the other."""

    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the branches."""

    branches: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item from ``least`` to ``most`` times."""

    item: "Node"
    least: int
    most: int | None


Node = Characters | Anchor | Sequence | Choice | Repeat


class Refusal(Exception):  # noqa: N818  (it ends a sentence that begins with the pattern)
    """What a pattern has that it may not have."""


def read_pattern(pattern: str) -> Node:
    """Return what a pattern means.

    Raises:
        Refusal: it is no expression, or has what is not supported.
    """
    node = _Reader(pattern).read()
    _check_anchors(node, at_start=True, at_end=True)
    return node


class _Reader:
    """Reads one pattern, from ``position`` on."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._depth = 0

    def read(self) -> Node:
        """Return the whole pattern."""
        node = self._choice()
        if self._position < len(self._pattern):
            self._refuse("a ')' without its '('")
        return node

    def _refuse(self, what: str) -> NoReturn:
        raise Refusal(f"has {what} near position {self._position}, which is not supported")

    def _next_is(self, *texts: str) -> bool:
        return self._pattern.startswith(texts, self._position)

    def _take(self, text: str) -> bool:
        found = self._next_is(text)
        self._position += len(text) * found
        return found

    def _character(self, inside: str) -> str:
        if self._position >= len(self._pattern):
            raise Refusal(f"ends inside of {inside}")
        self._position += 1
        return self._pattern[self._position - 1]

    def _choice(self) -> Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._position < len(self._pattern) and not self._next_is("|", ")"):
            items.append(self._repeated())
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self) -> Node:
        if self._next_is("*", "+", "?") or _QUANTIFIER.match(self._pattern, self._position):
            self._refuse("a repetition of nothing")
        item = self._atom()
        if _NO_MINIMUM.match(self._pattern, self._position):
            self._refuse("a repetition without its minimum, write {0,...},")
        found = _QUANTIFIER.match(self._pattern, self._position)
        if found is None:
            return item
        least, most = self._bounds(found)
        if isinstance(item, Anchor):
            self._refuse("a repeated anchor")
        self._position = found.end()
        self._take("?")  # as few as possible: that chooses among matches, not among texts
        if self._next_is("+"):
            self._refuse("a possessive repetition")
        if _QUANTIFIER.match(self._pattern, self._position):
            self._refuse("a repetition of a repetition")
        return Repeat(item, least, most)

    def _bounds(self, found: re.Match[str]) -> tuple[int, int | None]:
        if found[1]:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[1]]
        if max(len(found[2]), len(found[4])) > len(str(MAX_REPEAT)):
            self._refuse(f"a repetition beyond {MAX_REPEAT}")
        least = int(found[2])
        most = int(found[4]) if found[4] else None if found[3] else least
        if most is not None and most < least:
            self._refuse(f"a repetition {found[0]} whose maximum is below its minimum")
        return least, most

    def _atom(self) -> Node:
        begin = self._position
        character = self._character("it")
        if character == "(":
            return self._group()
        if character in "^$":
            return Anchor(character)
        if character == "[":
            ranges = self._class()
        elif character == ".":
            ranges = intersection(*ANY_BUT_LINE_ENDS)
        else:
            ranges = intersection(*self._unit(character, in_class=False))
        source = self._pattern[begin : self._position]
        if not ranges:
            raise Refusal(f"has {shortened(source)}, which no character matches")
        return Characters(ranges, source)

    def _group(self) -> Node:
        plain = _PLAIN_GROUP.match(self._pattern, self._position)
        for start, what in () if plain else _REFUSED_GROUPS:
            if self._next_is(start):
                self._refuse(what)
        self._position = plain.end() if plain else self._position
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise Refusal(f"has groups nested deeper than {MAX_NESTING}")
        inner = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise Refusal("has a '(' that is not closed")
        return inner

    def _class(self) -> Ranges:
        negated = self._take("^")
        if self._next_is("]"):
            self._refuse("a ']' that some read as the end of an empty class, write '\\]',")
        items: list[Readings] = []
        while (character := self._character("a class, '[...]'")) != "]":
            item = self._unit(character, in_class=True)
            if self._next_is("-") and not self._next_is("-]"):
                self._position += 1
                item = self._range(item)
            items.append(item)
        readings = (union(*of_items) for of_items in zip(*items, strict=True))
        return intersection(*(map(complement, readings) if negated else readings))

    def _range(self, lower: Readings) -> Readings:
        upper = self._unit(self._character("a class, '[...]'"), in_class=True)
        bounds = (*lower, *upper)
        if any(len(one) != 1 or one[0][0] != one[0][1] for one in bounds):
            self._refuse("a range of characters with a class at its end")
        first, last = lower[0][0][0], upper[0][0][0]
        if last < first:
            self._refuse("a range of characters whose end is before its beginning")
        return ((first, last),), ((first, last),)

    def _unit(self, character: str, *, in_class: bool) -> Readings:
        """Return the set of a character or an escape, whose first character is taken already."""
        if character != "\\":
            return self._single(character)
        escaped = self._character("an escape")
        if escaped in "dDwWsS":
            return escapes()[escaped]
        if escaped == "b" and in_class:
            return self._single("\b")
        if escaped in _CONTROLS:
            return self._single(_CONTROLS[escaped])
        if escaped == "0" and not self._next_is(*"0123456789"):
            return self._single("\0")
        code = _CODE.match(self._pattern, self._position - 1)
        if code is not None:
            self._position = code.end()
            number = int(code[code.lastindex or 0], 16)
            if number > TEXT[-1][1]:
                self._refuse(f"the code {code[0]} of no character")
            return self._single(chr(number))
        if escaped.isascii() and escaped.isalnum():
            self._refuse(_REFUSED_ESCAPES.get(escaped, f"the escape '\\{escaped}'"))
        return self._single(escaped)

    def _single(self, character: str) -> Readings:
        if not intersection(of(character)):
            self._refuse("half of a surrogate pair, which is no character,")
        return of(character), of(character)


def _check_anchors(node: Node, *, at_start: bool, at_end: bool) -> None:
    """Refuse ``^`` where something may stand before it, and ``$`` where something may follow."""
    match node:
        case Anchor(kind):
            if not (at_start if kind == "^" else at_end):
                where = "something before" if kind == "^" else "something behind"
                raise Refusal(f"has '{kind}' with {where} it, which is not supported")
        case Sequence(items):
            others = [i for i, item in enumerate(items) if not isinstance(item, Anchor)]
            first, last = (others[0], others[-1]) if others else (len(items), -1)
            for i, item in enumerate(items):
                _check_anchors(item, at_start=at_start and i <= first, at_end=at_end and i >= last)
        case Choice(branches):
            for branch in branches:
                _check_anchors(branch, at_start=at_start, at_end=at_end)
        case Repeat(item, _, most):
            once = most is not None and most <= 1
            _check_anchors(item, at_start=at_start and once, at_end=at_end and once)


def shortened(value: object) -> str:
    """Return a value as messages show it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
