"""Values of every shape that the request types of official clients describe."""

import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typing_extensions

MAX_DEPTH = 3
"""Objects inside of one another that are made in all shapes; deeper ones have one."""


def fields_of(params: Any) -> dict[str, Any]:
    """The fields of a ``TypedDict`` with their types."""
    return dict(typing.get_type_hints(params, include_extras=True))


def values_of(kind: Any, depth: int = 0) -> list[Any]:
    """Values of a type: each literal, each branch of a union, each field of an object."""
    kind = getattr(kind, "__value__", kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object or os.PathLike in {origin, kind} or origin is typing.IO:
        return ["x"]
    if kind in _PLAIN:
        return [_PLAIN[kind]]
    if origin in {typing.Required, typing.NotRequired, typing.Annotated}:
        return values_of(inner[0], depth)
    if origin is typing.Literal or origin is typing_extensions.Literal:
        return list(inner)
    if origin in {typing.Union, types.UnionType}:
        return [value for branch in inner for value in values_of(branch, depth)]
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return [{"x": value} for value in values_of(inner[1], depth)[:1]]
    if typing_extensions.is_typeddict(kind):
        return _objects(kind, depth)
    items = inner or getattr(kind, "__parameters__", ())
    if _is_sequence(origin or kind):
        return [[value] for value in values_of(items[0] if items else str, depth)]
    raise TypeError(f"no values are known of {kind!r}")


_PLAIN: dict[Any, Any] = {str: "x", int: 1, float: 1.0, bool: True, type(None): None}


def _is_sequence(kind: Any) -> bool:
    if "SequenceNotStr" in str(kind):
        return True
    return isinstance(kind, type) and issubclass(kind, Iterable | Sequence)


def _objects(kind: Any, depth: int) -> list[Any]:
    """Objects with what is required, and with each other field in each of its shapes."""
    hints = fields_of(kind)
    required = {
        name: values_of(hint, depth + 1)
        for name, hint in hints.items()
        if typing.get_origin(hint) is typing.Required
    }
    base = {name: values[0] for name, values in sorted(required.items())}
    if depth >= MAX_DEPTH:
        return [base]
    found = [base]
    for name in sorted(hints):
        values = required.get(name) or values_of(hints[name], depth + 1)
        found += [{**base, name: value} for value in values]
    return found
