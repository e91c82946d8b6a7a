"""Which parsers a model gets: by name, by its chat template, or none."""

import dataclasses
from typing import Any

import pytest

from minisgl.errors import RequestError, UnknownBackendError
from minisgl.parsing import ContentText, ReasoningText, ToolCallStart
from minisgl.parsing.tool_choice import plan_tools
from minisgl.plugins.host import PluginHost, load_plugins
from minisgl.plugins.parsers import AnswerParsers, check_parsers, select_parsers
from minisgl.settings import Settings

TOOL = {"type": "function", "function": {"name": "f"}}
HERMES = "<tool_call>\n{'name': ...}\n</tool_call>"


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


def select(host: PluginHost, template: str, **server: Any) -> AnswerParsers:
    return select_parsers(host, Settings.model_validate({"server": server}), template)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("", None, None),
        ("<|im_start|>{{ message.role }}", None, None),
        (HERMES, "hermes", None),
        (f"{HERMES} </think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder", None),
        ("<|start_header_id|> {{ tools }} 'parameters'", "llama3_json", None),
        ("<|start_header_id|> {{ tools }} [func_name1(params_name1=x)]", "pythonic", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "mistral"),
        ("<\uff5cAssistant\uff5c> content.split('</think>')", None, "qwen3"),
        ("<tool_call>name<arg_key>", None, None),
    ],
)
def test_auto_goes_by_the_chat_template(host, template, tools, reasoning) -> None:
    found = select(host, template)
    assert (found.tools and found.tools.name) == tools
    assert (found.reasoning and found.reasoning.name) == reasoning


def test_a_name_or_none_overrules_the_template(host) -> None:
    found = select(host, HERMES, tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    assert found.tools is not None
    assert found.reasoning is not None
    assert (found.tools.name, found.reasoning.name) == ("mistral", "deepseek_r1")
    assert select(host, f"{HERMES}</think>", tool_call_parser="none", reasoning_parser="none") == (
        AnswerParsers()
    )


def test_an_unknown_name_names_the_nearest(host) -> None:
    with pytest.raises(UnknownBackendError, match="Nearest: 'hermes'"):
        select(host, "", tool_call_parser="hermess")
    with pytest.raises(UnknownBackendError, match=r"server.reasoning_parser='x'"):
        check_parsers(host, Settings.model_validate({"server": {"reasoning_parser": "x"}}))
    check_parsers(host, Settings.model_validate({"server": {"reasoning_parser": "none"}}))


def test_tools_as_the_model_likes_need_a_parser(host) -> None:
    without = select(host, "")
    with pytest.raises(RequestError, match="--tool-call-parser") as caught:
        without.check(plan_tools([TOOL]))
    assert caught.value.param == "tool_choice"
    without.check(plan_tools([TOOL], "required"))
    without.check(plan_tools([TOOL], "none"))
    select(host, HERMES).check(plan_tools([TOOL]))


def test_special_tokens_show_only_where_calls_need_them(host) -> None:
    mistral = select(host, "[TOOL_CALLS]")
    assert mistral.special_tokens(plan_tools([TOOL]))
    assert not mistral.special_tokens(plan_tools([TOOL], "required"))
    assert not mistral.special_tokens(plan_tools(None))
    assert not select(host, HERMES).special_tokens(plan_tools([TOOL]))


def test_answers_get_the_parsers_that_their_request_needs(host) -> None:
    parsers = select(host, f"{HERMES}</think>")
    assert parsers.needs_prompt_tail
    auto = parsers.create(plan_tools([TOOL]), prompt_tail="<think>\n")
    events = auto.feed('a</think><tool_call>{"name": "f"}</tool_call>') + auto.finish()
    assert events[0] == ReasoningText("a")
    assert isinstance(events[1], ToolCallStart)
    silent = parsers.create(plan_tools([TOOL], "none"), prompt_tail="<think>\n")
    assert silent.feed("a</think><tool_call>") == [ReasoningText("a"), ContentText("<tool_call>")]
    forced = parsers.create(plan_tools([TOOL], "required"), prompt_tail="<think>\n")
    events = forced.feed('a</think>[{"name": "f", "parameters": {}}]')
    assert events[0] == ReasoningText("a")
    assert isinstance(events[1], ToolCallStart)
    grammar = parsers.create(plan_tools(None), prompt_tail="<think>\n", constrained=True)
    assert grammar.feed('a\n</think>\n{"a": 1}') == [ReasoningText("a"), ContentText('\n{"a": 1}')]


def test_a_parser_without_tags_reads_no_reasoning_where_a_grammar_rules(host) -> None:
    record = dataclasses.replace(host.reasoning_parsers.get("qwen3").record, tags=None)
    parsers = AnswerParsers(None, record)
    assert not parsers.reasons(constrained=True)
    assert parsers.reasoning_tags(constrained=True) is None
    assert parsers.reasons(constrained=False)
    read = parsers.create(plan_tools(None), prompt_tail="<think>\n", constrained=True)
    assert read.feed("a</think>b") == [ContentText("a</think>b")]


PLUGIN = """
from minisgl.plugins import ReasoningParserRecord, ToolParserRecord, hookimpl

class Loud:
    def __init__(self, context):
        pass
    def feed(self, text):
        return []
    def finish(self):
        return []

@hookimpl
def minisgl_tool_parsers():
    yield ToolParserRecord(name="loud", summary="x", create=Loud, rank_for=lambda t: 99)

@hookimpl
def minisgl_reasoning_parsers():
    yield ReasoningParserRecord(name="broken", summary="x", create=Loud, rank_for=lambda t: 1 / 0)
"""


def test_a_plugins_parser_competes_with_cores(plugin_site) -> None:
    plugin_site.add("acme-parsers", PLUGIN)
    code = """
    from minisgl.plugins.host import load_plugins
    from minisgl.plugins.parsers import select_parsers
    from minisgl.settings import Settings
    found = select_parsers(load_plugins(strict=True), Settings(), "<tool_call> </think>")
    print(found.tools.name, found.reasoning.name)
    """
    done = plugin_site.python(code)
    assert done.stdout.split() == ["loud", "qwen3"], done.stderr
    assert "rank_for raised ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("fault", ["create=5", "rank_for=None"])
def test_a_record_that_cannot_work_is_refused(plugin_site, fault) -> None:
    good = "create=Loud, rank_for=lambda t: 99"
    key = fault.partition("=")[0]
    kept = ", ".join(part for part in good.split(", ") if not part.startswith(key))
    plugin_site.add("acme-parsers", PLUGIN.replace(good, f"{kept}, {fault}"))
    code = """
    from minisgl.plugins.host import load_plugins
    print(load_plugins().failures[0].error)
    """
    assert f"loud: {key}" in plugin_site.python(code).stdout
