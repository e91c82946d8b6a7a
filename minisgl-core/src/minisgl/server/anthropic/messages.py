"""Anthropic's messages and content blocks as chat messages in OpenAI's form."""

from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl.errors import RequestError
from minisgl.server.fields import shortened

Block = Mapping[str, Any]


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the conversation as chat messages.

    Raises:
        RequestError: a message or block is malformed, or no text; ``param`` says which.
    """
    chat: list[dict[str, Any]] = []
    if system:
        chat.append({"role": "system", "content": _text(system, "system")})
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in {"user", "assistant", "system"}:
            raise RequestError(
                f"{where}.role must be 'user' or 'assistant', got {shortened(role)}",
                param=f"{where}.role",
            )
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
        elif role == "assistant":
            chat.append(_assistant(_blocks(content, f"{where}.content")))
        else:
            chat += _user(role, _blocks(content, f"{where}.content"))
    return chat


def _blocks(content: Any, where: str) -> list[tuple[str, Block]]:
    """Return the blocks of a message, each with its place.

    Raises:
        RequestError: there are none, or one is no object with a type.
    """
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"{where} must be text or a non-empty list of blocks, got {shortened(content)}",
            param=where,
        )
    for number, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(
                f"{where}[{number}] must be an object with a type, got {shortened(block)}",
                param=f"{where}[{number}]",
            )
    return [(f"{where}[{number}]", block) for number, block in enumerate(content)]


def _assistant(blocks: list[tuple[str, Block]]) -> dict[str, Any]:
    """Return an assistant's turn: text, thinking and tool calls in one message."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        match block["type"]:
            case "text":
                texts.append(_field(block, "text", where))
            case "thinking":
                thoughts.append(_field(block, "thinking", where))
            case "tool_use":
                calls.append(_call(block, where))
            case kind:
                raise _unsupported(kind, where, "text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block, where: str) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise RequestError(
            f"{where}.input must be an object, got {shortened(given)}", param=f"{where}.input"
        )
    function = {
        "name": _field(block, "name", where),
        "arguments": msgspec.json.encode(given).decode(),
    }
    return {"id": _field(block, "id", where), "type": "function", "function": function}


def _user(role: str, blocks: list[tuple[str, Block]]) -> list[dict[str, Any]]:
    """Return a user's turn: each tool's result is a message of its own, before or between text."""
    messages: list[dict[str, Any]] = []
    for where, block in blocks:
        match block["type"]:
            case "text":
                text = _field(block, "text", where)
                if messages and messages[-1]["role"] == role:
                    messages[-1]["content"] += text
                else:
                    messages.append({"role": role, "content": text})
            case "tool_result":
                result = block.get("content")
                message: dict[str, Any] = {
                    "role": "tool",
                    "tool_call_id": _field(block, "tool_use_id", where),
                    "content": "" if result is None else _text(result, f"{where}.content"),
                }
                if block.get("is_error"):  # for templates that know it
                    message["is_error"] = True
                messages.append(message)
            case kind:
                raise _unsupported(kind, where, "text and tool_result")
    return messages


def _text(content: Any, where: str) -> str:
    """Return text, or the texts of text blocks put together.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, block in _blocks(content, where):
        if block["type"] != "text":
            raise _unsupported(block["type"], place, "text")
        texts.append(_field(block, "text", place))
    return "".join(texts)


def _field(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(
            f"{where}.{name} must be a string, got {shortened(value)}", param=f"{where}.{name}"
        )
    return value


def _unsupported(kind: str, where: str, known: str) -> RequestError:
    return RequestError(
        f"{where}: blocks of type {shortened(kind)} are not supported here; known are {known}",
        param=where,
    )
