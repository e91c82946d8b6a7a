"""What the text must look like: OpenAI's ``response_format``, and the fields of vLLM and SGLang."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from minisgl.errors import RequestError
from minisgl.request import GrammarSpec
from minisgl.server.fields import Nested, RequestModel, shortened

Schema = dict[str, Any] | bool | str
"""A JSON Schema, or its JSON text."""


class JsonSchemaFormat(Nested):
    """``response_format.json_schema``."""

    name: str = ""
    """A label; without effect."""
    description: str | None = None
    """For the reader; without effect."""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON Schema that the text must satisfy."""
    strict: bool | None = None
    """Without effect: a schema is always enforced."""


class TextFormat(Nested):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Nested):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaResponse(Nested):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class StructuredOutputs(Nested):
    """``structured_outputs``: exactly one of its fields."""

    # ``json`` is the name of a method of pydantic's own.
    json_field: Annotated[Schema | None, Field(alias="json")] = None
    """A JSON Schema, as an object or as text."""
    regex: str | None = None
    """A regular expression that the whole text must match."""
    choice: list[str] | None = None
    """The text must be one of these."""
    grammar: str | None = None
    """An EBNF grammar, whose first rule is ``root``."""
    json_object: bool | None = None
    """Any JSON object."""


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaResponse, Field(discriminator="type")
]


class GrammarFields(RequestModel):
    """At most one of these may ask for a form of the text."""

    response_format: ResponseFormat | None = None
    """``text``, ``json_object``, or ``json_schema`` with a schema."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's way to ask for a form."""
    guided_json: Schema | None = None
    """A JSON Schema, as an object or as text (vLLM's older name)."""
    guided_regex: str | None = None
    """A regular expression that the whole text must match (vLLM's older name)."""
    guided_choice: list[str] | None = None
    """The text must be one of these (vLLM's older name)."""
    guided_grammar: str | None = None
    """An EBNF grammar (vLLM's older name)."""
    json_schema: Schema | None = None
    """A JSON Schema, as an object or as text (SGLang's name)."""
    regex: str | None = None
    """A regular expression that the whole text must match (SGLang's name)."""
    ebnf: str | None = None
    """An EBNF grammar (SGLang's name)."""

    def grammar(self) -> GrammarSpec | None:
        """Return what the text must look like.

        Raises:
            RequestError: several fields ask for a form, or one is malformed.
        """
        asked = self._asked()
        if len(asked) > 1:
            raise RequestError(
                f"{asked[0][0]} and {asked[1][0]} both say what the text must look like; "
                "send one of them",
                param=asked[1][0],
            )
        return asked[0][1] if asked else None

    def grammar_field(self) -> str | None:
        """Return the name of the field that says what the text must look like."""
        return next((name for name, _ in self._asked()), None)

    def _asked(self) -> list[tuple[str, GrammarSpec]]:
        """Return the fields that ask for a form, each with what it asks for."""
        readers: tuple[tuple[str, Callable[[Any, str], GrammarSpec]], ...] = (
            ("guided_json", _schema),
            ("guided_regex", _regex),
            ("guided_choice", _choice),
            ("guided_grammar", _ebnf),
            ("json_schema", _schema),
            ("regex", _regex),
            ("ebnf", _ebnf),
        )
        found = [
            ("response_format", _of_format(self.response_format)),
            ("structured_outputs", _of_structured_outputs(self.structured_outputs)),
        ]
        for name, read in readers:
            value = getattr(self, name)
            found.append((name, None if value is None else read(value, name)))
        return [(name, spec) for name, spec in found if spec is not None]


def _of_format(
    asked: TextFormat | JsonObjectFormat | JsonSchemaResponse | None,
) -> GrammarSpec | None:
    match asked:
        case JsonObjectFormat():
            return GrammarSpec("json_object")
        case JsonSchemaResponse():
            return _schema(asked.json_schema.json_schema, "response_format.json_schema.schema")
        case _:
            return None


def _of_structured_outputs(asked: StructuredOutputs | None) -> GrammarSpec | None:
    """Return what the one field of ``asked`` means.

    Raises:
        RequestError: it has none, or several.
    """
    if asked is None:
        return None
    where = "structured_outputs"
    readers: tuple[tuple[str, Any, Callable[[Any, str], GrammarSpec]], ...] = (
        ("json", asked.json_field, _schema),
        ("regex", asked.regex, _regex),
        ("choice", asked.choice, _choice),
        ("grammar", asked.grammar, _ebnf),
        ("json_object", asked.json_object or None, _json_object),
    )
    found = [read(value, f"{where}.{name}") for name, value, read in readers if value is not None]
    if len(found) != 1:
        raise RequestError(
            f"{where} must hold exactly one of json, regex, choice, grammar and json_object, "
            f"got {len(found)}",
            param=where,
        )
    return found[0]


def _json_object(_: object, __: str) -> GrammarSpec:
    return GrammarSpec("json_object")


def _schema(schema: Schema, where: str) -> GrammarSpec:
    """Return the grammar of a JSON Schema.

    Raises:
        RequestError: it is text that holds no JSON object.
    """
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is no JSON: {error}", param=where) from error
        if not isinstance(parsed, dict | bool):
            raise RequestError(
                f"{where} must be a JSON Schema, an object, got {shortened(parsed)}", param=where
            )
        return GrammarSpec("json_schema", schema)
    return GrammarSpec("json_schema", msgspec.json.encode(schema).decode())


def _regex(expression: str, where: str) -> GrammarSpec:
    return GrammarSpec("regex", _not_empty(expression, where))


def _ebnf(grammar: str, where: str) -> GrammarSpec:
    return GrammarSpec("grammar", _not_empty(grammar, where))


def _choice(choices: list[str], where: str) -> GrammarSpec:
    if not choices or not all(choices):
        raise RequestError(
            f"{where} must be a non-empty list of non-empty strings, got {shortened(choices)}",
            param=where,
        )
    return GrammarSpec("choice", msgspec.json.encode(choices).decode())


def _not_empty(text: str, where: str) -> str:
    if not text:
        raise RequestError(f"{where} must not be empty", param=where)
    return text
