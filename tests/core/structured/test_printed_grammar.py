"""Schemas whose grammars are written anew: as narrow as they should be, and otherwise the same."""

import json
import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.structured.json_schema import prepare
from minisgl.structured.printed_grammar import UnknownFormError, rewritten, tells_names_apart
from support.examples import scaled

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")

from minisgl.structured.xgrammar_worker import _json_schema  # noqa: E402  (needs xgrammar)

EOS = 256
VOCABULARY = [*(bytes([byte]) for byte in range(256)), b"</s>"]


@pytest.fixture(scope="module")
def compiler() -> Any:
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def takes(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text) and matcher.accept_token(EOS))


def compiled(compiler: Any, schema: dict[str, Any]) -> Any:
    return _json_schema(compiler, json.dumps(schema), 2)


# Patterns

WORDS = ["".join(letters) for length in range(5) for letters in product("abc", repeat=length)]
PATTERNS = st.recursive(
    st.sampled_from("abc"),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda branches: f"(?:{'|'.join(branches)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,3}", "{2}", "{0,2}", "{2,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=7,
)


def check_pattern(compiler: Any, pattern: str) -> None:
    grammar = compiled(compiler, {"type": "string", "pattern": f"^{pattern}$"})
    for word in WORDS:
        assert takes(grammar, f'"{word}"') == bool(re.fullmatch(pattern, word)), word


@pytest.mark.parametrize("pattern", ["(?:b{1,3}|b|a)", "(?:a|ab*c)+", "(?:(?:a|b+)|c?){2}"])
def test_alternatives_that_repeat_are_read_as_they_are_meant(compiler, pattern) -> None:
    assert prepare(json.dumps({"type": "string", "pattern": pattern})).rules
    check_pattern(compiler, pattern)


@given(PATTERNS)
@settings(max_examples=scaled(200))
def test_any_pattern_of_a_schema_matches_what_pythons_re_matches(compiler, pattern) -> None:
    check_pattern(compiler, pattern)


@pytest.mark.parametrize("place", ["patternProperties", "propertyNames", "items", "$defs", "anyOf"])
def test_such_patterns_are_written_wherever_they_stand(compiler, place) -> None:
    pattern = "(?:b{1,3}|b|a)"
    text = {"type": "string", "pattern": pattern}
    schema: dict[str, Any] = {
        "patternProperties": {"type": "object", "patternProperties": {pattern: {"type": "null"}}},
        "propertyNames": {
            "type": "object", "propertyNames": text, "additionalProperties": {"type": "null"},
        },
        "items": {"type": "array", "items": text},
        "$defs": {"type": "array", "items": {"$ref": "#/$defs/t"}, "$defs": {"t": text}},
        "anyOf": {"type": "array", "items": {"anyOf": [{"type": "null"}, text]}},
    }[place]  # fmt: skip
    frame = '{"%s": null}' if "Prop" in place or "Names" in place else '["%s"]'
    grammar = compiled(compiler, schema)
    assert takes(grammar, frame % "bbb")
    assert takes(grammar, frame % "a")
    assert not takes(grammar, frame % "abbb")


# Names

TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
NAMES = st.lists(st.text(TEXT, max_size=4), min_size=1, max_size=4, unique=True)


def spellings(name: str) -> list[str]:
    """JSON's strings of a name: as it is, with all escapes, and with one."""
    codes = [
        "".join(f"\\u{unit:04x}" for unit in memoryview(char.encode("utf-16-le")).cast("H"))
        for char in name
    ]
    plain = [json.dumps(char, ensure_ascii=False)[1:-1] for char in name]
    mixed = [
        "".join([*plain[:at], codes[at], *plain[at + 1 :]]) for at in range(len(codes))
    ]  # fmt: skip
    return ["".join(plain), "".join(codes), json.dumps(name)[1:-1], *mixed]


@pytest.mark.parametrize(
    "names", [["a"], ["é", "è"], ['"q"', "a\n"], ["", "😀"], ["ab", "abc", "a"]]
)
def test_no_other_name_is_a_declared_one_however_it_is_written(compiler, names) -> None:
    check_names(compiler, names)


@given(NAMES)
@settings(max_examples=scaled(100))
def test_so_it_is_with_any_names(compiler, names) -> None:
    check_names(compiler, names)


def check_names(compiler: Any, names: list[str]) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "additionalProperties": {"type": "string"},
    }
    grammar = compiled(compiler, schema)
    for name in names:
        for spelling in spellings(name):
            assert not takes(grammar, f'{{"{spelling}": "x"}}'), spelling
        assert takes(grammar, f"{{{json.dumps(name, ensure_ascii=False)}: 5}}") or "\x7f" in name
    for name in names:
        for other in (f"{name}z", f"z{name}", f"{name}é"):
            plain = json.dumps(other, ensure_ascii=False)[1:-1]
            if other not in names and plain == other and "\x7f" not in other:
                assert takes(grammar, f'{{"{plain}": "x"}}'), other
                assert not takes(grammar, f'{{"{plain}": 5}}'), other


@given(
    st.dictionaries(st.text(TEXT, max_size=3), st.text(TEXT, max_size=4), min_size=1, max_size=3),
    st.text(TEXT),
)
@settings(max_examples=scaled(100))
def test_all_else_is_as_xgrammar_has_it(compiler, pairs, other) -> None:
    """Texts of any characters: what is printed of them is read again."""
    schema = {
        "type": "object",
        "properties": {key: {"enum": [value, [value]]} for key, value in pairs.items()},
        "additionalProperties": False,
        "required": list(pairs),
    }
    direct = compiler.compile_json_schema(prepare(json.dumps(schema)).text)
    grammar = xgrammar.Grammar.from_json_schema(prepare(json.dumps(schema)).text)
    again = compiler.compile_grammar(rewritten(str(grammar), {}))
    for value in (pairs, {key: [text] for key, text in pairs.items()}, {**pairs, "x": other}):
        for ascii_only in (True, False):
            text = json.dumps(value, ensure_ascii=ascii_only)
            assert takes(direct, text) == takes(again, text)


# What is not known


def test_a_form_that_is_not_known_is_said_so() -> None:
    for grammar in ('root ::= "x1x"', 'root ::= Regex("x1x", json_string=false)'):
        with pytest.raises(UnknownFormError, match="version of XGrammar"):
            rewritten(grammar, {"x1x": '"a"'})
    with pytest.raises(UnknownFormError):
        rewritten('r_addl_key ::= (("\\"" r_addl_key_7))', {})
    assert rewritten('root ::= Regex("x1x", json_string=true)', {"x1x": "[a]"}) == "root ::= [a]"
    assert not tells_names_apart('root ::= "a"')


def test_an_object_that_no_rule_leads_to_needs_no_names(compiler) -> None:
    unused = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}}
    grammar = compiled(compiler, {"type": "integer", "$defs": {"unused": unused}})
    assert takes(grammar, "5")
