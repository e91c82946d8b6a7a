"""``tool_choice`` ``allowed_tools``, and how each protocol names what is wrong with tools."""

import json
from typing import Any

import httpx
import pytest

from minisgl.errors import RequestError
from minisgl.message import TokenizeRequest
from minisgl.plugins import builtin
from minisgl.plugins.parsers import AnswerParsers
from minisgl.server.errors import new_name, renamed
from support.http_asks import CHAT, run
from support.in_process_engine import MODEL, Served
from support.official_clients import openai_client

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEMPLATE = "{{ messages[-1]['content'] }}{{ eos_token }}"
PARSERS = AnswerParsers(
    next(record for record in builtin.minisgl_tool_parsers() if record.name == "hermes")
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("weather", "time", "place")
FUNCTIONS = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
CHAT_TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSES_TOOLS = [{"type": "function", **function} for function in FUNCTIONS]
MESSAGES_TOOLS = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]


def calls(*names: str) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Ulm"}}}}\n</tool_call>'
        for name in names
    )


def allowed(route: str, mode: str, *names: str) -> dict[str, Any]:
    """The fields of a request that may use some of the tools."""
    if route == CHAT:
        tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in names]
        choice: dict[str, Any] = {"allowed_tools": {"mode": mode, "tools": tools}}
        return {"tools": CHAT_TOOLS, "tool_choice": {"type": "allowed_tools", **choice}}
    tools = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
    return {"tools": RESPONSES_TOOLS, "tool_choice": choice}


def body(route: str, said: str, **fields: Any) -> dict[str, Any]:
    if route == RESPONSES:
        return {"input": said, **fields}
    return {"messages": [{"role": "user", "content": said}], "max_tokens": 900, **fields}


def ask(route: str, fields: dict[str, Any], **options: Any) -> tuple[Any, list[TokenizeRequest]]:
    async def scenario(server: Served) -> tuple[httpx.Response, list[TokenizeRequest]]:
        return await server.http.post(route, json=fields), server.engine.requests

    return run(scenario, chat_template=TEMPLATE, parsers=PARSERS, **options)


def called(route: str, said: str, fields: dict[str, Any], *, stream: bool) -> list[str]:
    """The functions that an answer calls, as OpenAI's client reads it."""

    async def scenario(server: Served) -> list[str]:
        async with openai_client(server) as client:
            if route == RESPONSES:
                more = {"model": MODEL, **body(route, said, **fields)}
                if stream:
                    async with client.responses.stream(**more) as events:
                        response = await events.get_final_response()
                else:
                    response = await client.responses.create(**more)
                return [item.name for item in response.output if item.type == "function_call"]
            more = {"model": MODEL, **body(route, said, **fields)}
            if stream:
                async with client.chat.completions.stream(**more) as chunks:
                    chat: Any = await chunks.get_final_completion()
            else:
                chat = await client.chat.completions.create(**more)
            return [call.function.name for call in chat.choices[0].message.tool_calls or ()]

    return run(scenario, chat_template=TEMPLATE, parsers=PARSERS)


both = pytest.mark.parametrize("route", [CHAT, RESPONSES])


@both
@pytest.mark.parametrize("stream", [False, True])
def test_only_allowed_tools_are_called_and_shown_to_the_model(route, stream) -> None:
    fields = allowed(route, "auto", "time", "weather")
    assert called(route, calls("weather", "place"), fields, stream=stream) == ["weather"]
    response, [request] = ask(route, body(route, calls("weather"), **fields))
    assert response.status_code == 200, response.text
    assert [tool["function"]["name"] for tool in request.tools] == ["weather", "time"]
    assert request.params.grammar is None


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_of_an_allowed_tool(route, stream) -> None:
    fields = allowed(route, "required", "place", "time")
    said = '[{"name": "place", "parameters": {"city": "Ulm"}}]'
    assert called(route, said, fields, stream=stream) == ["place"]
    response, [request] = ask(route, body(route, said, **fields))
    if route == RESPONSES:  # which repeats the choice
        assert response.json()["tool_choice"] == fields["tool_choice"]
    assert request.params.grammar is not None
    schema = json.loads(request.params.grammar.value)
    found = [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]]
    assert found == [["time"], ["place"]]
    assert set(schema["$defs"]) == {f"tools[{n}].function.parameters" for n in (1, 2)}


RESPONSE_CHOICES = [
    ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools"),
    ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
    ({"type": "allowed_tools", "mode": "x", "tools": []}, "tool_choice.mode"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [5]}, "tool_choice.tools[0]"),
    ({"type": "allowed_tools", "tools": [{"name": "no"}]}, "tool_choice.tools[0]"),
    ({"type": "allowed_tools", "tools": [{"type": "mcp"}]}, "tool_choice.tools[0].type"),
    ({"type": "allowed_tools", "tools": [{}]}, "tool_choice.tools[0].name"),
    ({"type": "function"}, "tool_choice.name"),
    ({"type": "function", "name": "no"}, "tool_choice"),
    ({"type": "web_search"}, "tool_choice.type"),
]


@pytest.mark.parametrize(("choice", "param"), RESPONSE_CHOICES, ids=str)
def test_what_is_wrong_with_a_responses_choice_has_its_own_name(choice, param) -> None:
    fields = body(RESPONSES, "x", tools=RESPONSES_TOOLS, tool_choice=choice)
    response, _ = ask(RESPONSES, fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("route", "tools", "param"),
    [
        (CHAT, [{"type": "function", "function": {"name": 5}}], "tools[0].function.name"),
        (RESPONSES, [{"type": "function", "name": 5}], "tools[0].name"),
        (RESPONSES, [{"type": "function", "name": "f", "parameters": 5}], "tools[0].parameters"),
        (MESSAGES, [{"name": 5, "input_schema": {}}], "tools[0].name"),
        (MESSAGES, [{"name": "f", "input_schema": 5}], "tools[0].input_schema"),
    ],
)
def test_a_malformed_tool_is_named_as_its_protocol_spells_it(route, tools, param) -> None:
    response, _ = ask(route, body(route, "x", tools=tools))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{param}: ") or (
        response.json()["error"]["message"].startswith(f"{param} must ")
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any', but"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "names the function 'f'"),
        ({"tools": MESSAGES_TOOLS}, "demand a call with tool_choice"),
    ],
    ids=str,
)
def test_anthropics_errors_use_no_words_of_openai(fields, words) -> None:
    async def scenario(server: Served) -> Any:
        return (await server.http.post(MESSAGES, json=body(MESSAGES, "x", **fields))).json()

    message = run(scenario)["error"]["message"]
    assert words in message
    assert "required" not in message


def test_an_error_is_about_the_longest_way_that_is_known() -> None:
    names = {"a": "b", "tools[].function": "tools[]", "tools[].function.parameters": "tools[].in"}
    assert new_name("a", names) == "b"
    assert new_name("a.x[3].y", names) == "b.x[3].y"
    assert new_name("ab.x", names) == "ab.x"
    assert new_name("tools", names) == "tools"
    assert new_name("tools[12].function.name", names) == "tools[12].name"
    assert new_name("tools[12].function.parameters.x[1]", names) == "tools[12].in.x[1]"


def test_an_error_of_a_grammar_of_several_tools_names_the_one() -> None:
    said = "grammar (json_schema) is not accepted: #/$defs/tools[1].function.parameters/a has 'not'"
    error = RequestError(said, param="grammar")
    for others, param in (
        ({}, "function.parameters"),
        ({"tools[].function": "tools[]"}, "parameters"),
    ):
        found = renamed(error, {"grammar": "tools", **others})
        assert found.param == f"tools[1].{param}"
        assert found.message == f"tools[1].{param} (json_schema) is not accepted: #/a has 'not'"
    assert renamed(error, {"grammar": "response_format"}).param == "response_format"
