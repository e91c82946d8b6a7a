"""Numbers, lists and ranges of numbers as they are typed after a flag.

What is wrong is an ``ArgumentTypeError``: argparse puts the flag in front of it.
"""

from argparse import ArgumentTypeError
from collections.abc import Callable, Collection

from minisgl.errors import nearest


def number(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"a number of at least 1 is needed, got {text!r}")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Parse ``1,32,256``, each at least 1."""
    return tuple(number(part) for part in text.split(","))


def token_range(text: str) -> tuple[int, int]:
    """Parse ``100:1024``, both included, or a single number."""
    low, colon, high = text.partition(":")
    found = (number(low), number(high) if colon else number(low))
    if found[0] > found[1]:
        raise ArgumentTypeError(f"a range goes from the smaller to the larger number, got {text!r}")
    return found


def seeds(text: str) -> tuple[int, ...]:
    """Parse ``0,1,2``: at least two different numbers."""
    found = tuple(int(part) if part.isdecimal() else -1 for part in text.split(","))
    if min(found) < 0 or len(found) < 2:
        raise ArgumentTypeError(
            f"at least two seeds are needed, the first of which warms up, got {text!r}"
        )
    if len(set(found)) < len(found):
        raise ArgumentTypeError(
            f"a seed may come only once, or the prefix cache answers its prompts, got {text!r}"
        )
    return found


def words(text: str) -> tuple[str, ...]:
    """Parse ``a,b``."""
    found = tuple(word.strip() for word in text.split(","))
    if not all(found):
        raise ArgumentTypeError(f"a list of names is needed, such as a,b, got {text!r}")
    return found


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of ``a,b`` that takes only ``known`` names."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        for name in found:
            if name not in known:
                raise ArgumentTypeError(
                    f"unknown name {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
                )
        return found

    return parse
