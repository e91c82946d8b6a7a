"""What of a JSON schema is obeyed, rewritten, or refused by name."""

import json
from typing import Any

import pytest

from minisgl.structured.json_schema import MAX_DEPTH, prepare
from minisgl.structured.pattern import any_text

INTEGER = {"type": "integer"}
STRING = {"type": "string"}


def refusal(schema: Any) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  (the message is what is looked at)
        prepare(schema if isinstance(schema, str) else json.dumps(schema))
    return str(refused.value)


def obj(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "it is no JSON"),
        ("NaN", "it is no JSON: NaN"),
        ("[]", "# must be an object or a boolean"),
        ({"type": "array", "uniqueItems": True}, "# has 'uniqueItems', which is not supported"),
        (obj(properties={"a": {"not": {}}}), "#/properties/a has 'not'"),
        ({"if": {}, "then": {}}, "which is not supported"),
        ({"$ref": "http://example.com/x.json"}, "nothing is fetched"),
        ({"$ref": "other.json"}, "nothing is fetched"),
        ({"$ref": "#anchor"}, "only those within the schema"),
        ({"$ref": 5}, "only those within the schema"),
        ({"$ref": "#/$defs/a", **INTEGER, "minimum": 3}, "'$ref' beside 'minimum', 'type'"),
        ({"anyOf": [INTEGER], **INTEGER, "minimum": 3}, "'anyOf' beside 'minimum'"),
        ({"allOf": [INTEGER, INTEGER]}, "only one is supported"),
        ({"anyOf": []}, "it needs one at least"),
        ({"anyOf": INTEGER}, "#/anyOf must be a list of schemas"),
        ({"type": "object", "anyOf": [INTEGER]}, "give each schema of it the type 'object'"),
        ({"minimum": 5}, '# has \'minimum\', which needs "type": "integer" beside it'),
        ({"type": "integer", "pattern": "a"}, '"type": "string"'),
        ({"type": 5}, "#/type must be a type or a list of them"),
        ({"type": []}, "#/type must be a type or a list of them"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "both 'maxLength' and 'pattern'"),
        ({"type": "string", "format": "date", "minLength": 3}, "both 'minLength' and 'format'"),
        ({"type": "string", "minLength": -1}, "must be a whole number from 0"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "maxLength 4 below minLength 5"),
        ({"type": "string", "pattern": 5}, "#/pattern must be a string"),
        (
            obj(properties={"a": {"type": "string", "pattern": "(?=a)b"}}),
            "#/properties/a/pattern: the pattern '(?=a)b' has a look-ahead",
        ),
        ({"type": "string", "pattern": 'say "a"'}, "asks for a quote, a backslash or a control"),
        (obj(patternProperties={"(?!a)": {}}), "#/patternProperties: the pattern '(?!a)' has a"),
        (obj(patternProperties={"a": {}, "b": {}}), "'patternProperties' beside another pattern"),
        (obj(patternProperties={"a": {}}, properties={}), "beside 'properties'"),
        (obj(minProperties=2, additionalProperties=True), "may come twice"),
        (obj(minProperties=2, patternProperties={"a": {}}), "may come twice"),
        (obj(minProperties=3, propertyNames={}, required=["a"]), "may come twice"),
        ({"type": "integer", "enum": ["a"]}, "no value of 'enum' is of the type 'integer'"),
        ({"enum": []}, "#/enum must be a list of values"),
        (obj(required="a"), "#/required must be a list of names"),
        (obj(required=["a"], additionalProperties=False), "# requires 'a'"),
        (obj(propertyNames={"pattern": "a", "type": "string"}, properties={}), "'propertyNames'"),
        (obj(properties={"a\0b": {}}), "# has the name 'a\\x00b'; U+0000 is not supported"),
        (obj(required=["\0"]), "U+0000 is not supported"),
        (obj(properties=[]), "#/properties must be an object"),
        (obj(properties={"a": 5}), "#/properties/a must be an object or a boolean"),
    ],
)
def test_what_would_be_passed_over_is_refused_by_name(schema: Any, message: str) -> None:
    assert message in refusal(schema)


@pytest.mark.parametrize("levels", [MAX_DEPTH + 2, 900, 100_000])
def test_deep_schemas_are_refused_at_once(levels: int) -> None:
    schema = '{"type": "array", "items": ' * levels + "true" + "}" * levels
    assert f"nested deeper than {MAX_DEPTH}" in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({**STRING, "minLength": 2, "maxLength": 5}, {**STRING, "pattern": any_text(2, 5)}),
        ({**STRING, "maxLength": 5}, {**STRING, "pattern": any_text(0, 5)}),
        ({**STRING, "minLength": 2}, {**STRING, "pattern": any_text(2, None)}),
        ({**STRING, "format": "colour", "maxLength": 5}, {**STRING, "pattern": any_text(0, 5)}),
        ({**STRING, "format": "uuid"}, {**STRING, "format": "uuid"}),
        ({**STRING, "format": "colour"}, STRING),
        ({**STRING, "pattern": r"^\d$"}, {**STRING, "pattern": "[0-9]"}),
        (obj(patternProperties={"^a": INTEGER}), obj(patternProperties={"a": INTEGER})),
        (obj(propertyNames={**STRING, "pattern": "^a"}),
         obj(propertyNames={**STRING, "pattern": "a"})),
        (obj(minProperties=2, additionalProperties=True, required=["a"], properties={"a": True}),
         obj(minProperties=2, additionalProperties=True, required=["a"], properties={"a": True})),
        ({**STRING, "enum": ["a", 1, None]}, {"enum": ["a"]}),
        ({"type": ["integer", "null"], "enum": [1, True, 2.0, 2.5, None]},
         {"enum": [1, 2.0, None]}),
        ({"const": 3}, {"enum": [3]}),
        ({"title": "x", "allOf": [INTEGER]}, {"title": "x", **INTEGER}),
        (obj(anyOf=[{"required": ["a"], "type": "object"}, True]),
         {"anyOf": [obj(required=["a"], properties={"a": True}), {"type": "object"}]}),
        (obj(required=["a", "b"], properties={"a": INTEGER}),
         obj(required=["a", "b"], properties={"a": INTEGER, "b": True})),
        (obj(required=["a"], additionalProperties=INTEGER),
         obj(required=["a"], additionalProperties=INTEGER, properties={"a": INTEGER})),
        ({"type": "array", "uniqueItems": False}, {"type": "array", "uniqueItems": False}),
        (True, True),
    ],
)  # fmt: skip
def test_what_can_be_said_otherwise_is_rewritten(schema: Any, expected: Any) -> None:
    assert json.loads(prepare(json.dumps(schema)).text) == expected


def test_what_is_obeyed_is_left_as_it_is() -> None:
    schema = obj(
        title="Order", description="x", properties={
            "id": {"type": "string", "format": "uuid"},
            "n": {"type": "integer", "minimum": 1, "maximum": 10},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "[a-z]+"}},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "default": None},
        },
        required=["id"], additionalProperties=False, **{"$defs": {"node": obj(properties={})}},
    )  # fmt: skip
    assert json.loads(prepare(json.dumps(schema)).text) == schema
