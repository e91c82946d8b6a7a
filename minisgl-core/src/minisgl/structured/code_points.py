r"""Sets of characters as ranges of code points, and what ``\d``, ``\w`` and ``\s`` stand for.

Engines of regular expressions read these escapes differently: in Python's ``re`` they know all of
Unicode, in ECMA-262 (JSON Schema's) only spaces do.
"""

import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import Final

Ranges = tuple[tuple[int, int], ...]
"""First and last code points, in order, with gaps between them."""

Readings = tuple[Ranges, Ranges]
"""A set as ECMA-262 reads it, and as Python's ``re`` does."""

_SURROGATES: Final = (0xD800, 0xDFFF)


def union(*sets: Ranges) -> Ranges:
    """Return what is in any of the sets."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(one for ranges in sets for one in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Return the characters of text that are not in a set; surrogates are none."""
    found, begin = [], 0
    for first, last in (*union(ranges, (_SURROGATES,)), (sys.maxunicode + 1, sys.maxunicode + 1)):
        if begin < first:
            found.append((begin, first - 1))
        begin = last + 1
    return tuple(found)


def intersection(*sets: Ranges) -> Ranges:
    """Return the characters of text that are in all of the sets."""
    return complement(union(*map(complement, sets)))


TEXT: Final = complement(())
"""All characters that text can hold."""


def of(characters: Iterable[str]) -> Ranges:
    """Return the set of some characters."""
    return union(tuple((ord(one), ord(one)) for one in characters))


_ASCII_DIGITS: Final = ((0x30, 0x39),)
_ASCII_WORD: Final = union(_ASCII_DIGITS, ((0x41, 0x5A), (0x61, 0x7A)), of("_"))
_ECMA_SPACE: Final = union(
    of("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), ((0x2000, 0x200A),)
)

ANY_BUT_LINE_ENDS: Final[Readings] = (complement(of("\n\r\u2028\u2029")), complement(of("\n")))
"""``.``"""


@cache
def escapes() -> dict[str, Readings]:
    """Return the sets of ``d``, ``w``, ``s``, ``D``, ``W`` and ``S``."""
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    found: dict[str, Readings] = {}
    for name, ecma in (("d", _ASCII_DIGITS), ("w", _ASCII_WORD), ("s", _ECMA_SPACE)):
        matches = re.finditer(rf"\{name}+", everything)
        python = tuple((match.start(), match.end() - 1) for match in matches)
        found[name] = (ecma, python)
        found[name.upper()] = (complement(ecma), complement(python))
    return found
