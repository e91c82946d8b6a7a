"""Every field that the clients of OpenAI and Anthropic can send is known to a strict server.

The fields, and values in all their shapes, come from the clients' own types. Each is taken, or
refused by a message that names it; none is "unknown".
"""

import re
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from minisgl.plugins import builtin
from minisgl.plugins.parsers import AnswerParsers
from minisgl.server.fields import NotOffered
from minisgl.server.route_docs import ROUTE_DOCS
from support.http_asks import CHAT, HELLO, TEXT, run
from support.in_process_engine import Served
from support.typed_values import fields_of, values_of

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"

TYPES: list[tuple[str, Any, dict[str, Any]]] = [
    (CHAT, chat_create_params.CompletionCreateParamsStreaming, {**HELLO, "max_tokens": 1}),
    (TEXT, completion_create_params.CompletionCreateParamsStreaming, {"prompt": "x"}),
    (
        RESPONSES,
        response_create_params.ResponseCreateParamsStreaming,
        {"input": "x", "max_output_tokens": 1},
    ),
    (MESSAGES, message_create_params.MessageCreateParamsStreaming, {**HELLO, "max_tokens": 1}),
    (MESSAGES, beta_create_params.MessageCreateParamsStreaming, {**HELLO, "max_tokens": 1}),
    (COUNT, message_count_tokens_params.MessageCountTokensParams, HELLO),
    (COUNT, beta_count_tokens_params.MessageCountTokensParams, HELLO),
]
HEADERS = {"betas"}
"""What the clients send as a header."""

PARTNERS = {"tools": {"tools", "tool_choice"}, "tool_choice": {"tool_choice", "tools"}}
"""Fields that are wrong together: either may be named."""

PARSERS = AnswerParsers(
    next(record for record in builtin.minisgl_tool_parsers() if record.name == "hermes")
)
"""Else ``tool_choice`` ``auto`` would be refused, whatever the tools are."""

ENUMERATED = {"model"}
"""Names of models that no server has; another test sends one that it has."""


def name_of(case: tuple[str, Any, dict[str, Any]]) -> str:
    return f"{case[0]}-{'beta' if '.beta.' in case[1].__module__ else 'v1'}"


every_type = pytest.mark.parametrize(("route", "params", "base"), TYPES, ids=map(name_of, TYPES))


@every_type
def test_every_field_is_one_of_ours(route, params, base) -> None:
    [body] = [doc.body for doc in ROUTE_DOCS if doc.path == route]
    known = {field.alias or name for name, field in body.model_fields.items()}
    assert fields_of(params).keys() - HEADERS <= known | body.not_offered.keys()


@every_type
def test_every_value_is_taken_or_refused_by_the_name_of_its_field(route, params, base) -> None:
    fields = {
        name: values_of(kind)
        for name, kind in fields_of(params).items()
        if name not in HEADERS | ENUMERATED
    }

    async def scenario(server: Served) -> tuple[set[str], list[Any]]:
        taken, wrong = set(), []
        for name, values in fields.items():
            for value in values:
                response = await server.http.post(route, json={**base, name: value})
                if response.status_code == 200:
                    taken.add(name)
                    continue
                message = response.json()["error"]["message"]
                says = named(message) & PARTNERS.get(name, {name})
                if response.status_code != 400 or not says or re.search("unknown", message):
                    wrong.append((name, value, response.status_code, message))
        return taken, wrong

    taken, wrong = run(scenario, strict_requests=True, parsers=PARSERS)
    assert wrong == []
    [body] = [doc.body for doc in ROUTE_DOCS if doc.path == route]
    offered = fields.keys() - body.not_offered.keys()
    assert offered - taken <= {"suffix", "stream_options"}  # that needs another field


def named(message: str) -> set[str]:
    """The fields that a message speaks of."""
    return set(re.findall(r"[a-z_]+", message))


@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES, MESSAGES, COUNT])
def test_what_has_no_effect_is_documented_so_and_what_is_refused_has_a_reason(route) -> None:
    [body] = [doc.body for doc in ROUTE_DOCS if doc.path == route]
    for refused in body.not_offered.values():
        assert isinstance(refused, NotOffered)
        assert len(refused.reason) > 10
    for name in ("user", "metadata", "service_tier", "cache_control", "prompt_cache_key"):
        if (field := body.model_fields.get(name)) is not None:
            assert re.search("without effect|come back", field.description or "", re.IGNORECASE)
