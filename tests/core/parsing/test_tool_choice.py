"""``tools`` and ``tool_choice``: what they mean, as a grammar, and how wrong ones are refused."""

import json
from typing import Any

import pytest

from minisgl.errors import RequestError
from minisgl.parsing.tool_choice import MAX_TOOLS, plan_tools, tool_constraint

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
F = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}},
            "$defs": {"node": NODE},
        },
    },
}
G = {"type": "function", "function": {"name": "g", "strict": True}}
NAMED = {"type": "function", "function": {"name": "g"}}


def schema(*arguments: Any, **keywords: Any) -> dict[str, Any]:
    grammar = plan_tools(*arguments, **keywords).grammar()
    assert grammar is not None
    assert grammar.kind == "json_schema"
    value: dict[str, Any] = json.loads(grammar.value)
    return value


@pytest.mark.parametrize(
    ("tools", "choice", "mode", "names"),
    [
        (None, None, "none", []),
        ([], "auto", "none", []),
        (None, "none", "none", []),
        ([F, G], None, "auto", ["f", "g"]),
        ([F, G], "auto", "auto", ["f", "g"]),
        ([F, G], "none", "none", []),
        ([F, G], "required", "required", ["f", "g"]),
        ([F, G], NAMED, "named", ["g"]),
        (
            [F, G],
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            "required",
            ["g"],
        ),
        ([F, G], {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}}, "auto", ["g"]),
    ],
)
def test_what_choices_mean(tools, choice, mode, names) -> None:
    plan = plan_tools(tools, choice)
    assert plan.mode == mode
    assert [tool["function"]["name"] for tool in plan.template_tools] == names
    assert (plan.grammar() is None) == (mode in ("none", "auto"))


def test_a_required_call_is_a_list_of_names_with_parameters() -> None:
    found = schema([F, G], "required")
    assert (found["type"], found["minItems"], "maxItems" in found) == ("array", 1, False)
    calls = found["items"]["anyOf"]
    assert [call["properties"]["name"]["enum"] for call in calls] == [["f"], ["g"]]
    assert found["$defs"]["tools[1].function.parameters"] == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_references_of_a_schema_still_point_to_its_own_parts() -> None:
    name = "tools[0].function.parameters"
    moved = schema([F, G], "required")["$defs"][name]
    assert moved["properties"]["n"] == {"$ref": f"#/$defs/{name}/$defs/node"}
    assert moved["properties"]["again"] == {"$ref": f"#/$defs/{name}"}
    assert moved["$defs"]["node"]["properties"]["next"] == {"$ref": f"#/$defs/{name}/$defs/node"}
    assert F["function"]["parameters"]["$defs"] == {"node": NODE}  # type: ignore[index]


def test_one_call_only_where_parallel_calls_are_forbidden() -> None:
    assert schema([F], "required", parallel=False)["maxItems"] == 1
    assert "maxItems" not in schema([F], "required", parallel=True)


def test_a_named_call_is_its_parameters() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert schema([F, G], named) == F["function"]["parameters"]  # type: ignore[index]
    assert tool_constraint([F, G], named) == plan_tools([F, G], named).grammar()


def test_the_grammars_take_calls_and_nothing_else() -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    alphabet = [bytes([code]) for code in range(256)]
    info = xgrammar.TokenizerInfo([*alphabet, b"</s>"], stop_token_ids=[256])
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema([F, G], "required")))
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(grammar)

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return bool(matcher.accept_string(text) and matcher.accept_token(256))

    assert accepts('[{"name": "f", "parameters": {"n": {"next": {}}}}]')
    assert accepts('[{"name": "g", "parameters": {}}, {"name": "f", "parameters": {}}]')
    assert not accepts("[]")
    assert not accepts('[{"name": "h", "parameters": {}}]')
    assert not accepts('[{"name": "f", "parameters": {"n": 5}}]')


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ("x", None, "tools"),
        ([F] * (MAX_TOOLS + 1), None, "tools"),
        ([5], None, "tools[0]"),
        ([F, {"type": "retrieval"}], None, "tools[1].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"function": {"name": ""}}], None, "tools[0].function.name"),
        ([{"function": {"name": "x" * 257}}], None, "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], None, "tools[0].function.parameters"),
        ([{"function": {"name": "f", "description": 5}}], None, "tools[0].function.description"),
        ([{"function": {"name": "f", "strict": "x"}}], None, "tools[0].function.strict"),
        ([F], "always", "tool_choice"),
        ([F], 5, "tool_choice"),
        (None, "required", "tool_choice"),
        ([F], NAMED, "tool_choice"),
        (None, NAMED, "tool_choice"),
        ([F], {"type": "custom"}, "tool_choice.type"),
        ([F], {"type": "function"}, "tool_choice.function.name"),
        ([F], {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            [F],
            {"type": "allowed_tools", "allowed_tools": {"mode": "x"}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            [F],
            {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            [F],
            {"type": "allowed_tools", "allowed_tools": {"tools": [F, {"function": {}}]}},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        (
            [F],
            {"type": "allowed_tools", "allowed_tools": {"tools": []}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_what_is_malformed_is_refused_by_field(tools, choice, param) -> None:
    with pytest.raises(RequestError) as caught:
        plan_tools(tools, choice)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert caught.value.message.startswith(param)
    assert len(caught.value.message) < 600
