"""Asks an in-process server, and reads its answers and streams as strictly as clients do."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from support.in_process_engine import Served, served
from support.patience import PATIENCE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def run(scenario: Callable[[Served], Awaitable[Any]], **options: Any) -> Any:
    """Return what ``scenario`` returns, run against a server of its own."""

    async def main() -> Any:
        async with served(**options) as server:
            return await asyncio.wait_for(scenario(server), PATIENCE)

    return asyncio.run(main())


def post(
    route: str,
    body: Any,
    *,
    content: bytes | None = None,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> httpx.Response:
    """Return the answer to one request."""

    async def scenario(server: Served) -> httpx.Response:
        if content is not None:
            return await server.http.post(route, content=content, headers=headers)
        return await server.http.post(route, json=body, headers=headers)

    return run(scenario, **options)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of OpenAI's form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of an OpenAI stream, after checking how they are framed."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    assert response.text.endswith("data: [DONE]\n\n")
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.count("data: [DONE]") == 1
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def text_of(route: str, choice: dict[str, Any]) -> str:
    """The text of a choice, or of a chunk's choice."""
    if route == TEXT:
        return choice["text"]
    return choice.get("delta", choice.get("message", {})).get("content") or ""


def whole_of(route: str, events: list[dict[str, Any]]) -> dict[int, tuple[str, str]]:
    """Text and finish reason of each choice of a stream, which must have exactly one."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in reasons, "a chunk after the finish chunk"
            texts[index] = texts.get(index, "") + text_of(route, choice)
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
                assert text_of(route, choice) == ""
    assert texts.keys() == reasons.keys()
    return {index: (text, reasons[index]) for index, text in texts.items()}
