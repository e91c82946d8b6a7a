"""Chats that are too much for the tokenizer, which all requests share, never get there."""

import asyncio
from typing import Any

import pytest

from minisgl.server.served_model import MAX_CHAT_VALUES, MIN_CHAT_CHARS
from minisgl.tokenizer.encoding import MIN_CHARS_PER_TOKEN
from support.in_process_engine import MAX_SEQ_LEN, Served, served
from support.patience import PATIENCE

ROUTES = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "input",
    "/tokenize": "messages",
}


def ask(route: str, **fields: Any) -> tuple[int, str, int]:
    """Return the status, the text of the answer, and how many questions the tokenizer got."""

    async def main() -> tuple[int, str, int]:
        async with served() as server:
            asked = count_questions(server)
            limit = {"max_tokens": 1} if "messages" in route else {}
            answer = await asyncio.wait_for(
                server.http.post(route, json={**limit, **fields}), PATIENCE
            )
            return answer.status_code, answer.text, len(asked)

    return asyncio.run(main())


def count_questions(server: Served) -> list[Any]:
    asked: list[Any] = []
    send = server.engine.send

    def noted(message: Any) -> None:
        asked.append(message)
        send(message)

    server.client._tokenizer.send = noted  # type: ignore[method-assign]
    return asked


def chat(number: int, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for _ in range(number)]


@pytest.mark.parametrize("route", ROUTES)
def test_more_messages_than_tokens_are_refused(route: str) -> None:
    status, text, questions = ask(route, **{ROUTES[route]: chat(MAX_SEQ_LEN + 1, "a")})
    assert status == 400
    assert f"holds {MAX_SEQ_LEN + 1} messages" in text
    assert questions == 0


@pytest.mark.parametrize("route", ROUTES)
def test_short_texts_that_are_too_long_together_are_refused(route: str) -> None:
    length = MIN_CHARS_PER_TOKEN * MAX_SEQ_LEN // 2
    status, text, questions = ask(route, **{ROUTES[route]: chat(3, "a" * length)})
    assert status == 400
    assert f"has {3 * length} characters" in text
    assert questions == 0


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"x": ["y"] * MAX_CHAT_VALUES}},
        {"chat_template_kwargs": {"x": "y" * (MIN_CHAT_CHARS + 1)}},
        {"messages": [{"role": "user", "content": "a", "x": [[]] * MAX_CHAT_VALUES}]},
        {"messages": [{"role": "user", "content": "a", "x": {"y" * (MIN_CHAT_CHARS + 1): 1}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": {}}}}]},
    ],
)
def test_what_templates_get_besides_the_texts_has_a_limit_too(
    route: str, fields: dict[str, Any]
) -> None:
    if "tools" in fields:
        inner = fields["tools"][0]["function"]["parameters"]
        inner["x"] = {f"p{number}": {} for number in range(MAX_CHAT_VALUES)}
    status, text, questions = ask(route, **{"messages": chat(1, "a"), **fields})
    assert status == 400
    assert "chat_template_kwargs hold" in text
    assert questions == 0


def test_a_chat_with_tools_and_variables_within_the_limits_is_served() -> None:
    fields = {"chat_template_kwargs": {"x": ["y"] * (MAX_CHAT_VALUES // 2), "z": "y" * 2**19}}
    status, _, questions = ask("/v1/chat/completions", messages=chat(2, "a"), **fields)
    assert (status, questions) == (200, 1)
