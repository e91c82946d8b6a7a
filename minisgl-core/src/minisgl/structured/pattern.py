"""Regular expressions as XGrammar is given them, so that it obeys them to the letter.

A JSON schema means ECMA-262's expressions, a client may check answers with Python's: what both let
through is read (``minisgl.structured.pattern_reader``). XGrammar reads some of what is left in its
own way, so what is written holds nothing but characters, classes without ``^``, groups,
alternatives and repetitions of what is not empty.
"""

from typing import Final

from minisgl.structured.code_points import TEXT, Ranges, complement, intersection, of, union
from minisgl.structured.pattern_reader import (
    Anchor,
    Characters,
    Choice,
    Node,
    Refusal,
    Repeat,
    Sequence,
    read_pattern,
    shortened,
)

MAX_RANGES: Final = 64
"""Ranges of a class; of one that has more beyond Latin-1, as the opposite of all words has, the
widest are kept, or XGrammar would need seconds."""

JSON_PLAIN: Final = complement(union(((0, 0x1F),), of('"\\')))
"""What a string of JSON may hold as it is."""

_EMPTY: Final = Sequence(())


def translate(pattern: str, *, in_string: bool) -> str:
    """Return a pattern as XGrammar is given it: the whole text must match it.

    Args:
        pattern: the expression.
        in_string: it describes a string inside of JSON. Characters that JSON must escape are left
            out of its classes then.

    Raises:
        ValueError: it is no expression, or has what is not supported; the message says which.
    """
    try:
        node = _without_empty_repeats(read_pattern(pattern))
        return _written(node, JSON_PLAIN if in_string else TEXT)
    except Refusal as refused:
        raise ValueError(f"the pattern {shortened(pattern)} {refused}") from None


def string_rule(pattern: str) -> str | None:
    """Return a pattern of JSON strings as the body of an EBNF rule, if XGrammar needs that.

    In a schema its automata are wrong where an alternative repeats something. All others are as
    they should be, and much faster to follow than rules.

    Raises:
        ValueError: as ``translate``.
    """
    try:
        node = _without_empty_repeats(read_pattern(pattern))
        return _rule(node) if _is_misread(node) else None
    except Refusal as refused:
        raise ValueError(f"the pattern {shortened(pattern)} {refused}") from None


def any_text(least: int, most: int | None) -> str:
    """Return the pattern, as XGrammar is given it, of JSON's strings of some length."""
    return _written(Repeat(Characters(TEXT, ""), least, most), JSON_PLAIN)


def _without_empty_repeats(node: Node) -> Node:
    """Return a pattern of the same texts that repeats nothing that may be empty.

    XGrammar gets lost in the many ways to repeat what is empty.
    """
    match node:
        case Anchor():
            return _EMPTY
        case Sequence(items):
            found = [one for one in map(_without_empty_repeats, items) if one != _EMPTY]
            return found[0] if len(found) == 1 else Sequence(tuple(found))
        case Choice(branches):
            choice = Choice(tuple(map(_without_empty_repeats, branches)))
            return _EMPTY if all(one == _EMPTY for one in choice.branches) else choice
        case Repeat(item, least, most):
            inner = _without_empty_repeats(item)
            if most == 0 or inner == _EMPTY:
                return _EMPTY
            if not _may_be_empty(inner):
                return _repeat(inner, least, most)
            return inner if most == 1 else _repeat(_not_empty(inner), 0, most)
    return node


def _may_be_empty(node: Node) -> bool:
    match node:
        case Sequence(items):
            return all(map(_may_be_empty, items))
        case Choice(branches):
            return any(map(_may_be_empty, branches))
        case Repeat(_, least, _):
            return least == 0
    return False


def _not_empty(node: Node) -> Node:
    """Return a pattern of the same texts but the empty one; ``node`` repeats nothing empty.

    Of a sequence in which all may be empty, some item is the first that is not.
    """
    match node:
        case Sequence(items) if _may_be_empty(node):
            rests = (items[i:] for i in range(len(items)))
            return Choice(tuple(Sequence((_not_empty(first), *rest)) for first, *rest in rests))
        case Choice(branches):
            return Choice(tuple(_not_empty(one) for one in branches if one != _EMPTY))
        case Repeat(item, 0, most):
            return _repeat(item, 1, most)
    return node


def _repeat(item: Node, least: int, most: int | None) -> Node:
    """Return a repetition; of a repetition without end, one of what that repeats."""
    if isinstance(item, Repeat) and item.most is None and item.least <= 1 and most is None:
        return Repeat(item.item, least * item.least, None)
    return Repeat(item, least, most)


def _written(node: Node, allowed: Ranges) -> str:
    """Return the pattern of characters that are ``allowed``."""
    match node:
        case Sequence(items):
            return "".join(_written(item, allowed) for item in items)
        case Choice(branches):
            return f"(?:{'|'.join(_written(branch, allowed) for branch in branches)})"
        case Repeat(item, least, most):
            inner = _written(item, allowed)
            group = inner if isinstance(item, Characters) else f"(?:{inner})"
            return group + _quantifier(least, most)
        case Characters():
            return _class_of(node, allowed)
    return ""


def _is_misread(node: Node) -> bool:
    """Return whether an alternative of the pattern repeats something."""
    match node:
        case Choice(branches):
            return any(_repeats(one) or _is_misread(one) for one in branches)
        case Sequence(items):
            return any(map(_is_misread, items))
        case Repeat(item):
            return _is_misread(item)
    return False


def _repeats(node: Node) -> bool:
    match node:
        case Choice(inner) | Sequence(inner):
            return any(map(_repeats, inner))
        case Repeat():
            return True
    return False


def _rule(node: Node) -> str:
    """Return the pattern of what strings of JSON hold as it is, in EBNF."""
    match node:
        case Sequence(items):
            return f"({' '.join(map(_rule, items))})" if items else '""'
        case Choice(branches):
            return f"({' | '.join(map(_rule, branches))})"
        case Repeat(item, least, most):
            return f"({_rule(item)}{_quantifier(least, most)})"
        case Characters():
            ranges = (f"\\U{a:08x}-\\U{b:08x}" for a, b in _ranges_of(node, JSON_PLAIN))
            return f"[{''.join(ranges)}]"
    return '""'


def _quantifier(least: int, most: int | None) -> str:
    """Return ``{0,1}`` for ``?``: XGrammar lets ``(ab+)?`` begin in the middle of its group."""
    short = {(0, None): "*", (1, None): "+", (1, 1): ""}.get((least, most))
    return f"{{{least},{'' if most is None else most}}}" if short is None else short


def _ranges_of(node: Characters, allowed: Ranges) -> Ranges:
    """Return the ranges of a class that are ``allowed``.

    Raises:
        Refusal: there are none.
    """
    ranges = intersection(node.ranges, allowed)
    if not ranges:
        raise Refusal(
            f"has {shortened(node.source)}, which asks for a quote, a backslash or a control "
            "character; that is not supported inside of JSON"
        )
    if len(ranges) > MAX_RANGES:
        widest = sorted(ranges, key=lambda one: one[1] - one[0])[-MAX_RANGES:]
        ranges = union(tuple(widest), intersection(ranges, ((0, 0xFF),)))
    return ranges


def _class_of(node: Characters, allowed: Ranges) -> str:
    ranges = _ranges_of(node, allowed)
    first, last = ranges[0]
    if len(ranges) == 1 and first == last:
        return _code_of(first)
    inner = (
        _code_of(first) if first == last else f"{_code_of(first)}-{_code_of(last)}"
        for first, last in ranges
    )
    # For XGrammar even an escaped "^" makes the opposite of a class that begins with it.
    front = _code_of(ranges[-1][1]) if chr(first) == "^" else ""
    return f"[{front}{''.join(inner)}]"


def _code_of(code_point: int) -> str:
    character = chr(code_point)
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\u{{{code_point:x}}}"
