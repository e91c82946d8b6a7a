"""Tool and reasoning parsers: what they find, at every cut of the text, and what they let pass."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.parsing import (
    ContentText,
    ParserContext,
    ParserEvent,
    ReasoningText,
    TextParser,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.parsing.families import implied_think, mistral_think, think
from minisgl.parsing.tool_choice import plan_tools
from minisgl.parsing.tools_json import HermesCalls, Llama3Calls, MistralCalls
from minisgl.parsing.tools_pythonic import PythonicCalls
from minisgl.parsing.tools_xml import Qwen3CoderCalls


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (tool("f", n={"type": "integer"}, s={"type": "string"}), tool("g"), tool("a.b"))


@dataclass
class Parsed:
    """The events of one answer, put together."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        values = [json.loads(text) for text in self.arguments]
        return list(zip(self.names, values, strict=True))

    def add(self, event: ParserEvent) -> None:
        match event:
            case ContentText(text):
                assert text
                self.content += text
            case ReasoningText(text):
                assert text
                self.reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(self.names)
                self.names.append(name)
                self.ids.append(call_id)
                self.arguments.append("")
            case ToolCallArguments(index, fragment):
                assert fragment
                assert index == len(self.names) - 1
                self.arguments[index] += fragment


def parsed(parser: TextParser, *pieces: str) -> Parsed:
    found = Parsed()
    for piece in pieces:
        for event in parser.feed(piece):
            found.add(event)
    for event in parser.finish():
        found.add(event)
    return found


def test_names_that_python_cannot_write_are_read_as_they_are() -> None:
    tools = (tool("get-weather"), tool("get"), tool("2x"), tool("a b/c"))
    text = '[get-weather(city="Ulm"), get(n=1), 2x(), a b/c (l=["(", 2])] ok'
    calls = [("get-weather", {"city": "Ulm"}), ("get", {"n": 1}), ("2x", {}),
             ("a b/c", {"l": ["(", 2]})]  # fmt: skip
    for at in range(len(text) + 1):
        found = parsed(PythonicCalls(ParserContext(tools=tools)), text[:at], text[at:])
        assert (found.calls, found.content.strip()) == (calls, "ok"), at
    assert parsed(PythonicCalls(ParserContext(tools=tools)), *text).calls == calls
    for other in ("[get-rain(x=1)]", "[get-weather]", "[get-weather(1)]", "[2y()]", "[get-weather"):
        assert parsed(PythonicCalls(ParserContext(tools=tools)), *other).content == other


def of(kind: Any, *pieces: str, **context: Any) -> Parsed:
    return parsed(kind(ParserContext(tools=TOOLS, **context)), *pieces)


def required(context: ParserContext) -> TextParser:
    return plan_tools(list(TOOLS), "required").constrained_parser(context)


def named(context: ParserContext) -> TextParser:
    choice = {"type": "function", "function": {"name": "f"}}
    return plan_tools(list(TOOLS), choice).constrained_parser(context)


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ARGUMENTS = {"n": -1.5e3, "s": 'a "b" \\ \n</tool_call>{}[] 日🦙', "l": [True, None, {"k": []}]}
CALL = json.dumps({"name": "f", "arguments": ARGUMENTS})
LLAMA = json.dumps({"name": "f", "parameters": ARGUMENTS}, ensure_ascii=False)
XML = (
    '<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\na\n"b"\n</parameter>\n</function>'
)

MENDED = "<function=f><parameter=s>5</parameter><parameter=x>{'a': True}<parameter=n>1</function>"
MENDED = MENDED.replace("'", '"')

CALLS: list[tuple[Any, str, str, list[tuple[str, Any]]]] = [
    (HermesCalls, hermes(CALL), "", [("f", ARGUMENTS)]),
    (HermesCalls, f"I look.\n{hermes(CALL)}\n{hermes(CALL)}\n", "I look.", [("f", ARGUMENTS)] * 2),
    (HermesCalls, hermes('{"name": "g"}'), "", [("g", {})]),
    (HermesCalls, hermes('{"name": "g", "arguments": {}}}'), "", [("g", {})]),
    (HermesCalls, hermes('{"name": "g", "arguments": {"a": 1}'), "", [("g", {"a": 1})]),
    (HermesCalls, hermes('{"arguments": {"a": 1}, "name": "g"}'), "", [("g", {"a": 1})]),
    (HermesCalls, hermes('{"name": "g", "arguments": "{\\"a\\": 1}"}'), "", [("g", {"a": 1})]),
    (HermesCalls, hermes('{"name": "g", "arguments": null}'), "", [("g", {})]),
    (HermesCalls, hermes('{"name": "g", "arguments": {"a": "x\ny\\d"}}'), "",
     [("g", {"a": "x\ny\\d"})]),
    (HermesCalls, '<tool_call>{"name": "g"}', "", [("g", {})]),
    (HermesCalls, f"a {hermes(CALL)} b", "a b", [("f", ARGUMENTS)]),
    (Llama3Calls, LLAMA, "", [("f", ARGUMENTS)]),
    (Llama3Calls, f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("f", ARGUMENTS)] * 2),
    (Llama3Calls, f"<|python_tag|>{LLAMA};<|python_tag|>{LLAMA}\n", "", [("f", ARGUMENTS)] * 2),
    (Llama3Calls, '{"type": "function", "name": "g", "parameters": {}}', "", [("g", {})]),
    (Llama3Calls, '{"type": "function", "function": {"name": "g"}}', "", [("g", {})]),
    (Llama3Calls, '{"type": "function", "function": "g", "parameters": {}}', "", [("g", {})]),
    (Llama3Calls, f" {LLAMA} and so on", " and so on", [("f", ARGUMENTS)]),
    (MistralCalls, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("f", ARGUMENTS)] * 2),
    (MistralCalls, f"Yes.[TOOL_CALLS][{CALL}]", "Yes.", [("f", ARGUMENTS)]),
    (MistralCalls, '[TOOL_CALLS]f{"n": 1}[TOOL_CALLS]g{}', "", [("f", {"n": 1}), ("g", {})]),
    (MistralCalls, '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"n": 1}', "", [("f", {"n": 1})]),
    (PythonicCalls, '[f(n=1, s="it\'s ]) \\" 日")]', "", [("f", {"n": 1, "s": "it's ]) \" 日"})]),
    (PythonicCalls, "[g(), a.b(x=[1, -2.5, {'k': None}], y=true)]", "",
     [("g", {}), ("a.b", {"x": [1, -2.5, {"k": None}], "y": True})]),
    (PythonicCalls, "<|python_start|>[g()]<|python_end|>", "", [("g", {})]),
    (PythonicCalls, "[g(), ]<|python_end|>", "", [("g", {})]),
    (PythonicCalls, "[g(),\n f(n=1),\n]", "", [("g", {}), ("f", {"n": 1})]),
    (Qwen3CoderCalls, f"ok\n<tool_call>\n{XML}\n</tool_call>", "ok",
     [("f", {"n": 5, "s": 'a\n"b"'})]),
    (Qwen3CoderCalls, f"{XML}\n{XML}", "", [("f", {"n": 5, "s": 'a\n"b"'})] * 2),
    (Qwen3CoderCalls, "<tool_call><function=g></function></tool_call>", "", [("g", {})]),
    (Qwen3CoderCalls, MENDED, "", [("f", {"s": "5", "x": '{"a": True}', "n": 1})]),
    (required, f' [{LLAMA}, {{"name": "g", "parameters": {{}}}}]', "",
     [("f", ARGUMENTS), ("g", {})]),
    (named, json.dumps(ARGUMENTS, indent=1), "", [("f", ARGUMENTS)]),
    (named, "{}", "", [("f", {})]),
]  # fmt: skip

CONTENT: list[tuple[Any, str]] = [
    *((kind, text) for kind in (HermesCalls, Llama3Calls, MistralCalls, PythonicCalls,
                               Qwen3CoderCalls, required, named)
      for text in ("", " ", "hello", "\n hello \n", "a < b [c] {d}", "日🦙", "]", "}")),
    (HermesCalls, "<tool_call"),
    (HermesCalls, hermes("no json")),
    (HermesCalls, hermes("{}")),
    (HermesCalls, hermes('{"name": 5, "arguments": {}}')),
    (HermesCalls, hermes('{"name": "", "arguments": {}}')),
    (HermesCalls, hermes('{"name": "f", "arguments": [1]}')),
    (HermesCalls, hermes('{"name": "f", "arguments": "no json"}')),
    (HermesCalls, hermes("[]")),
    (HermesCalls, hermes('{"name": "\\ud800", "arguments": {}}')),
    (HermesCalls, '<tool_call>{"name": "f", "argum'),
    (HermesCalls, "<tool_call><tool_call>x"),
    (Llama3Calls, '{"answer": 5} is it'),
    (Llama3Calls, '{"name": "unknown", "parameters": {}}'),
    (Llama3Calls, '<|python_tag|>search.call(query="x")'),
    (Llama3Calls, '{"name": "f"'),
    (MistralCalls, "[TOOL_CALLS] hello you {"),
    (MistralCalls, "[TOOL_CALLS][1]"),
    (MistralCalls, "[TOOL_CALLS]" + "x" * 500 + "{}"),
    (MistralCalls, "[TOOL_CALLS]x[TOOL_CALLS]"),
    (PythonicCalls, "[link](http://x)"),
    (PythonicCalls, "[f(1)]"),
    (PythonicCalls, "[unknown(x=1)]"),
    (PythonicCalls, "[f(x=open('y'))]"),
    (PythonicCalls, "[f(x=1"),
    (PythonicCalls, "[f(x=(]) y"),
    (PythonicCalls, "[f(n=1e999)]"),
    (PythonicCalls, "<|python_start|>x"),
    (Qwen3CoderCalls, "<tool_call>\n{}\n</tool_call>"),
    (Qwen3CoderCalls, "<function= x>"),
    (Qwen3CoderCalls, "<function=" + "x" * 500 + ">"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CALLS)
def test_calls_and_content_at_every_cut(kind, text, content, calls) -> None:
    whole = of(kind, text)
    assert whole.calls == calls
    assert whole.content == content
    assert len(set(whole.ids)) == len(calls)
    for at in range(len(text) + 1):
        found = of(kind, text[:at], text[at:])
        assert (found.calls, found.content) == (calls, content), text[:at]
    assert of(kind, *text).calls == calls
    assert of(kind, *text).arguments == whole.arguments


@pytest.mark.parametrize(("kind", "text"), CONTENT)
def test_what_is_no_call_is_content_to_the_last_character(kind, text) -> None:
    whole = of(kind, text)
    assert (whole.content, whole.names) == (text, [])
    for at in range(len(text) + 1):
        assert of(kind, text[:at], text[at:]).content == text
    assert of(kind, *text).content == text


FORBIDDEN = [
    (HermesCalls, hermes('{"name": "g", "arguments": {}}')),
    (Llama3Calls, '{"name": "g", "parameters": {}}'),
    (MistralCalls, '[TOOL_CALLS][{"name": "g", "arguments": {}}]'),
    (MistralCalls, '[TOOL_CALLS]g[ARGS]{"a": 1}'),
    (PythonicCalls, "[g(n=1)]"),
    (Qwen3CoderCalls, "<tool_call>\n<function=g>\n</function>\n</tool_call>"),
]


@pytest.mark.parametrize(("kind", "text"), FORBIDDEN)
def test_calls_of_forbidden_functions_are_content_to_the_last_character(kind, text) -> None:
    def found(*pieces: str) -> Parsed:
        tools = tuple(tool for tool in TOOLS if tool["function"]["name"] != "g")
        return parsed(kind(ParserContext(tools=tools, forbidden=frozenset("g"))), *pieces)

    for at in range(len(text) + 1):
        assert (found(text[:at], text[at:]).content, found(text).names) == (text, [])


KINDS = [HermesCalls, Llama3Calls, MistralCalls, PythonicCalls, Qwen3CoderCalls, required, named]
WORDS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<function=f>",
         "<parameter=s>", "</parameter>", "</function>", '"', "{", "}", "[", "]", "(", ")", ",",
         ":", "\\", " ", "\n", '"name"', '"arguments"', '"parameters"', "f", "g", "n=", "1", "-",
         "true", "x", "日", CALL, LLAMA, XML, "[g(n=1)"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@given(words=st.lists(st.sampled_from(WORDS), max_size=14), data=st.data())
def test_no_cut_changes_what_is_found_in_any_text(kind, words, data) -> None:
    text = "".join(words)
    whole = of(kind, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = of(kind, *pieces)
    assert (found.content, found.names, found.arguments) == (
        whole.content,
        whole.names,
        whole.arguments,
    )
    if not whole.names:  # half a call is dropped where there is nothing but calls
        assert whole.content == text or (kind is required and not whole.content)


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    ascii_only=st.booleans(),
    data=st.data(),
)
def test_any_arguments_come_back_as_the_same_value(value, ascii_only, data) -> None:
    call = {"name": "f", "arguments": {"value": value}}
    text = hermes(
        json.dumps(call, ensure_ascii=ascii_only, indent=data.draw(st.sampled_from([None, 1])))
    )
    at = data.draw(st.integers(0, len(text)))
    assert of(HermesCalls, text[:at], text[at:]).calls == [("f", {"value": value})]


def test_arguments_come_as_they_are_written() -> None:
    parser = HermesCalls(ParserContext())
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": {"te') == [
        ToolCallStart(0, parser_id(parser), "f"),
        ToolCallArguments(0, '{"te'),
    ]
    assert parser.feed('xt": "abc') == [ToolCallArguments(0, 'xt": "abc')]


def parser_id(parser: Any) -> Any:
    class _Any:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, str) and other.startswith("call_")

        __hash__ = None  # type: ignore[assignment]

    return _Any()


def test_content_comes_at_once_but_for_what_may_be_a_mark() -> None:
    parser = HermesCalls(ParserContext())
    assert parser.feed("hello <tool") == [ContentText("hello")]
    assert parser.feed("s> x") == [ContentText(" <tools> x")]


def test_arguments_that_break_off_are_left_open_and_what_follows_is_content() -> None:
    found = of(HermesCalls, '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>')
    assert (found.names, found.arguments) == (["f"], ['{"a": '])
    assert found.content == "tru}}</tool_call>"
    broken = of(MistralCalls, '[TOOL_CALLS]f{"a": tru}')
    assert (broken.names, broken.arguments, broken.content) == (["f"], ['{"a": '], "tru}")
    cut = of(HermesCalls, '<tool_call>{"name": "f", "arguments": {"a": 12')
    assert (cut.names, cut.arguments, cut.content) == (["f"], ['{"a": 12'], "")


def test_mistrals_ids_are_what_its_templates_take() -> None:
    found = of(MistralCalls, f"[TOOL_CALLS][{CALL},{CALL}]")
    assert all(len(i) == 9 and i.isalnum() and i.isascii() for i in found.ids)
    assert of(MistralCalls, "[TOOL_CALLS]f[CALL_ID]x1[ARGS]{}").ids == ["x1"]


def test_nesting_without_end_is_no_call() -> None:
    deep = '{"name": "f", "arguments": {"a": ' + "[" * 100_000
    found = of(HermesCalls, f"<tool_call>{deep}")
    assert len(found.arguments[0]) < 1000
    assert found.content.startswith("[[")
    assert of(PythonicCalls, "[f(a=" + "(" * 100_000).names == []


REASONING: list[tuple[Any, str, str, str, str]] = [
    (think, "", "<think>\na b\n</think>\n\nhello\n", "a b", "hello\n"),
    (think, "", "hello <think>x</think>", "", "hello <think>x</think>"),
    (think, "<assistant>\n<think>\n", "a\n\nb</think>c", "a\n\nb", "c"),
    (think, "<think>\n", "<think>a</think>c", "a", "c"),
    (think, "<think>\n\n</think>\n\n", "c", "", "c"),
    (think, "<think>", "never ends\n", "never ends\n", ""),
    (think, "", "  <think></think>\nc", "", "c"),
    (think, "", " c ", "", " c "),
    (think, "", "<think>a</think>b</think><think>c", "a", "b</think><think>c"),
    (implied_think, "", "a</think>\n\nb", "a", "b"),
    (implied_think, "", "<think>a</think>b", "a", "b"),
    (implied_think, "x</think>", "b", "", "b"),
    (mistral_think, "", "[THINK]a[/THINK]b", "a", "b"),
    (think, "", "", "", ""),
    (think, "", "<thi", "", "<thi"),
]


@pytest.mark.parametrize(("kind", "tail", "text", "reasoning", "content"), REASONING)
def test_reasoning_at_every_cut(kind, tail, text, reasoning, content) -> None:
    for at in range(len(text) + 1):
        found = of(kind, text[:at], text[at:], prompt_tail=tail)
        assert (found.reasoning, found.content) == (reasoning, content), text[:at]
    found = of(kind, *text, prompt_tail=tail)
    assert (found.reasoning, found.content) == (reasoning, content)


@given(
    words=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "\n", " ", "a", "<th"]), max_size=9
    ),
    tail=st.sampled_from(["", "<think>\n", "</think>"]),
    data=st.data(),
)
def test_no_cut_changes_the_reasoning_of_any_text(words, tail, data) -> None:
    text = "".join(words)
    at = data.draw(st.integers(0, len(text)))
    whole = of(think, text, prompt_tail=tail)
    assert of(think, text[:at], text[at:], prompt_tail=tail) == whole
    letters = [character for character in text if character == "a"]
    assert [c for c in whole.reasoning + whole.content if c == "a"] == letters
