"""JSON schemas as XGrammar obeys them: what it would ignore is rewritten, or refused by name.

XGrammar takes a schema for a generator, and passes over what it cannot turn into rules. A client
that reads the answer cannot know that, so nothing of a schema may be passed over: its every text
must validate. Not every valid text can come: objects have the properties that the schema declares,
in its order, and a pattern matches the whole string. ``oneOf`` is obeyed as ``anyOf``.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl.structured.formats import PATTERNS
from minisgl.structured.pattern import any_text, string_rule, translate
from minisgl.structured.pattern_reader import shortened

MAX_DEPTH: Final = 64
"""Schemas inside of one another. XGrammar's time grows with a power of it."""

_REFUSED: Final = frozenset({
    "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else",
    "dependentRequired", "dependentSchemas", "dependencies", "additionalItems", "$dynamicRef",
    "$recursiveRef",
})  # fmt: skip
_FORMATS: Final = frozenset({
    "email", "duration", "ipv6", "uuid", "uri", "uri-reference", "uri-template", "json-pointer",
    "relative-json-pointer",
})  # fmt: skip
"""Formats that XGrammar obeys; beside them and ``PATTERNS`` a format is an annotation."""

_OF_NUMBERS: Final = frozenset({
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
_OF_STRINGS: Final = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_ARRAYS: Final = frozenset({
    "items", "prefixItems", "minItems", "maxItems", "unevaluatedItems",
})  # fmt: skip
_OF_OBJECTS: Final = frozenset({
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required",
    "propertyNames", "minProperties", "maxProperties",
})  # fmt: skip
_OPEN_ENDED: Final = frozenset({
    "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties",
})  # fmt: skip
"""What lets names in that are not declared; without any of it XGrammar takes none."""

_CHOICES: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_CONSTRAINTS: Final = (
    _OF_NUMBERS | _OF_STRINGS | _OF_ARRAYS | _OF_OBJECTS | frozenset((*_CHOICES, "type"))
)
_KINDS: Final[tuple[tuple[frozenset[str], tuple[str, ...]], ...]] = (
    (_OF_NUMBERS, ("integer", "number")),
    (_OF_STRINGS, ("string",)),
    (_OF_ARRAYS, ("array",)),
    (_OF_OBJECTS, ("object",)),
)

Schema = dict[str, Any] | bool


@dataclass(slots=True)
class PreparedSchema:
    """A schema as XGrammar obeys it in full.

    Attributes:
        text: of the schema.
        rules: patterns that XGrammar would misread, in EBNF, by what stands for them in the schema.
        has_other_names: whether an object takes names beside those that it declares.
    """

    text: str = ""
    rules: dict[str, str] = field(default_factory=dict)
    has_other_names: bool = False


def prepare(text: str) -> PreparedSchema:
    """Return the schema as XGrammar obeys it in full.

    Args:
        text: the schema as JSON.

    Raises:
        ValueError: it is no schema, or asks for what is not supported; the message says where.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} schemas") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    preparation = _Preparation(text)
    preparation.found.text = json.dumps(preparation.schema(schema, "#", 0))
    return preparation.found


class _Preparation:
    """One schema's way through; ``path`` says where in it one is, as in a ``$ref``."""

    def __init__(self, text: str) -> None:
        self.found = PreparedSchema()
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
        self._placeholder = f"pattern{digest.hexdigest()}x"

    def schema(self, schema: object, path: str, depth: int) -> Schema:
        """Return a schema or subschema as it is passed on."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _wrong(path, "an object or a boolean", schema)
        if depth > MAX_DEPTH:
            raise ValueError(f"{shortened(path)} is nested deeper than {MAX_DEPTH} schemas")
        for name in schema.keys() & _REFUSED:
            if schema[name] not in (False, None):
                raise ValueError(f"{path} has {name!r}, which is not supported")
        found = dict(schema)
        self._check_types(found, path)
        for choice in _CHOICES:
            if choice in found:
                return self._choice(choice, found, path, depth)
        self._string(found, path)
        self._object(found, path)
        for name in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties",
                     "propertyNames"):  # fmt: skip
            if name in found:
                found[name] = self.schema(found[name], f"{path}/{name}", depth + 1)
        self._maps(found, ("properties", "patternProperties"), path, depth)
        self._maps(found, ("$defs", "definitions"), path, depth)
        if "prefixItems" in found:
            found["prefixItems"] = self._list(found["prefixItems"], f"{path}/prefixItems", depth)
        return found

    def _choice(self, choice: str, found: dict[str, Any], path: str, depth: int) -> Schema:
        """Return a schema that is one of others, or one of some values."""
        others = (found.keys() & _CONSTRAINTS) - {choice}
        if others - ({"type"} if choice != "$ref" else set()):
            raise ValueError(
                f"{path} has {choice!r} beside {', '.join(map(repr, sorted(others)))}, which is "
                "not supported"
            )
        self._maps(found, ("$defs", "definitions"), path, depth)
        if choice == "$ref":
            target = found["$ref"]
            if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
                raise ValueError(
                    f"{path} has the $ref {shortened(target)}; only those within the schema "
                    "('#' or '#/...') are followed, nothing is fetched"
                )
            return found
        kind = found.pop("type", None)
        if choice in ("const", "enum"):
            return _values(choice, found, kind, path)
        branches = self._list(found[choice], f"{path}/{choice}", depth)
        if not branches or (choice == "allOf" and len(branches) > 1):
            raise ValueError(
                f"{path}/{choice} has {len(branches)} schemas; "
                + ("only one is supported" if branches else "it needs one at least")
            )
        if kind is not None:
            branches = [_typed(one, kind, f"{path}/{choice}") for one in branches]
        if choice == "allOf":
            rest = {name: value for name, value in found.items() if name != "allOf"}
            only = branches[0]
            return {**rest, **only} if isinstance(only, dict) else only
        found[choice] = branches
        return found

    @staticmethod
    def _check_types(found: Mapping[str, Any], path: str) -> None:
        """Refuse keywords that say nothing, because their type is not asked for."""
        kinds = found.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds is not None and not (
            isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds)
        ):
            raise ValueError(
                f"{path}/type must be a type or a list of them, got {shortened(kinds)}"
            )
        for keywords, of in _KINDS:
            given = sorted(found.keys() & keywords)
            if given and not (set(kinds or ()) & set(of)):
                raise ValueError(
                    f'{path} has {given[0]!r}, which needs "type": "{of[0]}" beside it'
                )

    def _string(self, found: dict[str, Any], path: str) -> None:
        """Rewrite lengths and formats as patterns where XGrammar's own are wider."""
        if found.get("format") not in _FORMATS | PATTERNS.keys():
            found.pop("format", None)
        lengths = sorted(found.keys() & {"minLength", "maxLength"})
        given = [*lengths[:1], *(name for name in ("pattern", "format") if name in found)]
        if len(given) > 1:
            raise ValueError(f"{path} has both {given[0]!r} and {given[1]!r}: one is supported")
        if "pattern" in found:
            if not isinstance(found["pattern"], str):
                raise ValueError(f"{path}/pattern must be a string")
            found["pattern"] = self._pattern(found["pattern"], f"{path}/pattern")
        elif found.get("format") in PATTERNS:
            found["pattern"] = self._pattern(PATTERNS[found.pop("format")], path)
        if lengths:
            least, most = found.pop("minLength", 0), found.pop("maxLength", None)
            for value in (least, most):
                if value is not None and (type(value) is not int or value < 0):
                    raise ValueError(f"{path}/{lengths[0]} must be a whole number from 0")
            if most is not None and most < least:
                raise ValueError(f"{path} has maxLength {most} below minLength {least}")
            found["pattern"] = any_text(least, most)

    def _object(self, found: dict[str, Any], path: str) -> None:
        """Declare what is required: XGrammar obeys ``required`` for declared properties only."""
        required = found.get("required", [])
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise ValueError(f"{path}/required must be a list of names, got {shortened(required)}")
        _check_names(found, len(set(required)), path)
        declared = found.get("properties", {})
        for name in (*(declared if isinstance(declared, dict) else ()), *required):
            if "\0" in name:  # XGrammar takes it for the end of the name
                raise ValueError(f"{path} has the name {shortened(name)}; U+0000 is not supported")
        open_ended = ("additionalProperties", "unevaluatedProperties")
        takes_others = any(found.get(name, False) is not False for name in open_ended)
        self.found.has_other_names |= bool(declared or required) and takes_others
        missing = [name for name in required if isinstance(declared, dict) and name not in declared]
        if not missing:
            return
        others = found.get("additionalProperties", True)
        if others is False or "patternProperties" in found or "propertyNames" in found:
            raise ValueError(f"{path} requires {missing[0]!r}, which its properties lack")
        found["properties"] = {**declared, **dict.fromkeys(missing, others)}

    def _maps(self, found: dict[str, Any], names: tuple[str, ...], path: str, depth: int) -> None:
        for name in names:
            if name not in found:
                continue
            inner = found[name]
            if not isinstance(inner, dict):
                raise _wrong(f"{path}/{name}", "an object", inner)
            passed_on = {}
            for key, value in inner.items():
                of = f"{path}/{name}"
                written = self._pattern(key, of) if name == "patternProperties" else key
                passed_on[written] = self.schema(value, f"{of}/{key}", depth + 1)
            found[name] = passed_on

    def _pattern(self, pattern: str, path: str) -> str:
        """Return a pattern as it is passed on.

        Raises:
            ValueError: it is not supported; the message begins with ``path``.
        """
        try:
            rule = string_rule(pattern)
            if rule is None:
                return translate(pattern, in_string=True)
        except ValueError as refused:
            raise ValueError(f"{path}: {refused}") from None
        placeholder = f"{self._placeholder}{len(self.found.rules)}x"
        self.found.rules[placeholder] = rule
        return placeholder

    def _list(self, schemas: object, path: str, depth: int) -> list[Schema]:
        if not isinstance(schemas, list):
            raise _wrong(path, "a list of schemas", schemas)
        return [self.schema(one, f"{path}/{i}", depth + 1) for i, one in enumerate(schemas)]


def _check_names(found: Mapping[str, Any], num_required: int, path: str) -> None:
    """Refuse names of an object that XGrammar may take twice, or for one schema out of two."""
    if "propertyNames" in found and "properties" in found:
        raise ValueError(f"{path} has 'propertyNames' beside 'properties'; not supported")
    patterns = found.get("patternProperties")
    if isinstance(patterns, dict) and patterns and ("properties" in found or len(patterns) > 1):
        other = "'properties'" if "properties" in found else "another pattern"
        raise ValueError(
            f"{path} has a pattern of 'patternProperties' beside {other}; not supported, since a "
            "name that both describe would have to satisfy both"
        )
    open_ended = found.keys() & _OPEN_ENDED
    least = found.get("minProperties", 0)
    more = isinstance(least, int) and least > num_required + 1
    if more and any(found[name] is not False for name in open_ended):
        raise ValueError(
            f"{path} has minProperties {least}, and names that are neither declared nor required; "
            "not supported, since one of these may come twice"
        )


def _values(choice: str, found: dict[str, Any], kind: object, path: str) -> Schema:
    """Return ``const`` or ``enum`` without the values that are not of the type."""
    values = [found["const"]] if choice == "const" else found["enum"]
    if not isinstance(values, list) or not values:
        raise ValueError(f"{path}/enum must be a list of values, got {shortened(values)}")
    kinds = [kind] if isinstance(kind, str) else kind
    if isinstance(kinds, list):
        values = [value for value in values if any(_is_a(value, one) for one in kinds)]
        if not values:
            raise ValueError(f"{path}: no value of {choice!r} is of the type {kind!r}")
    rest = {name: value for name, value in found.items() if name != choice}
    return {**rest, "enum": values}


def _is_a(value: object, kind: object) -> bool:
    if kind == "integer":
        whole = isinstance(value, float) and value.is_integer()
        return (isinstance(value, int) and not isinstance(value, bool)) or whole
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    types: dict[object, type] = {
        "string": str, "boolean": bool, "null": type(None), "array": list, "object": dict,
    }  # fmt: skip
    return kind in types and isinstance(value, types[kind])


def _typed(schema: Schema, kind: object, path: str) -> Schema:
    """Return a branch with the type that stands beside its ``anyOf``."""
    if schema is True:
        return {"type": kind}
    if schema is False or schema.get("type") == kind:
        return schema
    if "type" in schema or schema.keys() & set(_CHOICES):
        raise ValueError(f"{path}: give each schema of it the type {kind!r}, instead of beside it")
    return {"type": kind, **schema}


def _wrong(path: str, expected: str, found: object) -> ValueError:
    return ValueError(f"{path} must be {expected}, got {shortened(found)}")


def _no_constant(name: str) -> object:
    raise ValueError(f"it is no JSON: {name}")
