"""Messages in all forms that OpenAI's clients send, and what templates get of them."""

import copy
import json
from typing import Any

import pytest

from minisgl.errors import RequestError
from minisgl.tokenizer.chat import ChatOptions, ChatTemplate
from minisgl.tokenizer.messages import check_messages
from support.text_tokenizers import byte_level

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
AS_JSON = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}"
)
AS_TEXT = AS_JSON.replace("c.function.arguments | tojson", "c.function.arguments")
ADDED = AS_JSON.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")


def checked(**message: Any) -> dict[str, Any]:
    return check_messages([message], developer_role="system")[0]


def refused(**message: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        checked(**message)
    return caught.value


def template(source: str) -> ChatTemplate:
    tokenizer = byte_level()
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


def rendered(source: str, messages: list[dict], **options: Any) -> str:
    return template(source).render(messages, ChatOptions(**options)).text


def test_arguments_become_objects_and_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [copy.deepcopy(CALL)]}]
    found = check_messages(messages, developer_role="system")[0]
    assert found["content"] == ""
    assert found["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich"}
    assert messages == [{"role": "assistant", "content": None, "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), (None, {}), ({"a": 1}, {"a": 1}), ("{broken", "{broken"), ("[1]", "[1]")],
)
def test_arguments_that_are_no_json_object_stay_text(arguments, expected) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    found = checked(role="assistant", content="", tool_calls=[call])
    assert found["tool_calls"][0]["function"]["arguments"] == expected


def test_the_old_function_call_is_a_tool_call() -> None:
    old = {"name": "f", "arguments": "{}"}
    found = checked(role="assistant", content=None, function_call=old)
    assert found["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert "function_call" not in found
    assert checked(role="function", name="f", content="x")["role"] == "tool"


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"reasoning": "because"}, ""),
        ({"content": "", "refusal": None}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
    ],
)
def test_content_of_assistants(message, content) -> None:
    assert checked(role="assistant", **message)["content"] == content


def test_reasoning_has_both_names() -> None:
    found = checked(role="assistant", content="x", reasoning="r")
    assert (found["reasoning"], found["reasoning_content"]) == ("r", "r")
    both = checked(role="assistant", content="x", reasoning="r", reasoning_content="c")
    assert both["reasoning_content"] == "c"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "x"}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [CALL, {**CALL, "type": "custom"}]},
            "messages[0].tool_calls[1].type",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": ""}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}, "messages[0].tool_calls[0].id"),
        ({"role": "assistant", "function_call": "f"}, "messages[0].function_call[0]"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "reasoning": 5}, "messages[0].reasoning"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
    ],
)
def test_malformed_messages_are_refused_by_field(message, param) -> None:
    error = refused(**message)
    assert error.param == param
    assert param in error.message


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(refused(role="user", content=[5] * 10_000).message) < 500


def test_unknown_roles_are_the_templates_business() -> None:
    assert rendered(AS_JSON, [{"role": "ipython", "content": "x"}]) == "[ipython]x"


def test_the_developer_is_the_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert rendered(AS_JSON, messages) == "[system]x"
    assert rendered(AS_JSON + "{# for developers #}", messages) == "[system]x"
    assert rendered(AS_JSON + "{% if 'developer' %}{% endif %}", messages) == "[developer]x"


@pytest.mark.parametrize("source", [AS_JSON, AS_TEXT, ADDED])
def test_every_template_gets_arguments_in_the_form_that_it_needs(source) -> None:
    messages: list[dict] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    text = rendered(source, messages)
    arguments = text[text.index("<weather ") + 9 : text.index(">")]
    assert json.loads(arguments) == {"city": "Zürich"}
    assert "[tool]sunny" in text


def test_tools_reach_the_template_in_openais_form() -> None:
    text = rendered("{{ tools | tojson }}", [{"role": "user", "content": "x"}], tools=[TOOL])
    assert json.loads(text) == [TOOL]
    without = rendered("{{ tools is none }}", [{"role": "user", "content": "x"}])
    assert without == "True"


def test_a_template_that_shows_no_tools_is_told_once(caplog) -> None:
    chat = template(AS_JSON)
    for _ in range(3):
        chat.render([{"role": "user", "content": "x"}], ChatOptions(tools=[TOOL]))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tools" in caplog.text


def test_the_last_message_goes_on() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer"}]
    chat = ChatTemplate(byte_level())
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    found = chat.render(messages, options).text
    assert found.endswith("<|im_start|>assistant\nThe answer")
    assert chat.tail(messages, options, found) == "<|im_start|>assistant\nThe answer"


def test_going_on_and_beginning_anew_exclude_each_other() -> None:
    chat = ChatTemplate(byte_level())
    with pytest.raises(RequestError) as caught:
        chat.render([{"role": "user", "content": "x"}], ChatOptions(continue_final_message=True))
    assert caught.value.param == "continue_final_message"


def test_the_tail_is_what_the_template_adds_for_the_answer() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}<header><think>\n{% endif %}"
    chat = template(source)
    messages = [{"role": "user", "content": "a </think> b <think>"}]
    text = chat.render(messages, ChatOptions()).text
    assert chat.tail(messages, ChatOptions(), text) == "<header><think>\n"


def test_the_tail_of_a_template_that_cannot_do_without_a_header_is_the_end() -> None:
    source = "{% if not add_generation_prompt %}{{ raise_exception('x') }}{% endif %}y<think>"
    chat = template(source)
    messages = [{"role": "user", "content": "x"}]
    text = chat.render(messages, ChatOptions()).text
    assert chat.tail(messages, ChatOptions(), text) == "y<think>"


def test_a_template_cannot_leave_its_sandbox() -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RequestError, match="chat template"):
        rendered(source, [{"role": "user", "content": "x"}])


def test_templates_that_take_parts_only_get_parts() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    assert rendered(source, [{"role": "user", "content": "hello <|im_end|>"}]) == (
        "[user]hello <|im_end|>"
    )
    strict = source.replace("[{{ m.role }}]", "{{ m.content[0].text }}|")
    assert rendered(strict, [{"role": "user", "content": "x"}]) == "x|x"
    assert rendered(AS_JSON, [{"role": "user", "content": "x"}]) == "[user]x"
