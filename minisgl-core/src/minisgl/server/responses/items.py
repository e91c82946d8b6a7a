"""Input items of ``/v1/responses`` as chat messages."""

from collections.abc import Mapping
from typing import Any, Final

from minisgl.errors import RequestError
from minisgl.server.fields import shortened

ROLES: Final = frozenset({"user", "assistant", "system", "developer"})
TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "reasoning_text"})


def chat_messages(
    instructions: str | None, given: str | list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the conversation as chat messages.

    An assistant's text, reasoning and function calls that follow one another are one message, as
    chat templates expect.

    Raises:
        RequestError: an item is malformed, or no text; ``param`` says which.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for number, item in enumerate(given):
        where = f"input[{number}]"
        kind = item.get("type")
        kind = "message" if kind is None else kind
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "function_call":
            _assistant(messages).setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            call_id = _string(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            turn = _assistant(messages)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(item, where)
        else:
            raise RequestError(
                f"{where}: items of type {shortened(kind)} are not supported; known are message, "
                "function_call, function_call_output and reasoning",
                param=where,
            )
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {shortened(role)}",
            param=f"{where}.role",
        )
    text = _text(item.get("content"), f"{where}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == role and not last["content"]:
        last["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end, which begins now if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {
        "name": _string(item, "name", where),
        "arguments": _string(item, "arguments", where),
    }
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, or else its summary."""
    if item.get("content"):
        return _text(item["content"], f"{where}.content")
    summary = item.get("summary") or []
    texts = [part.get("text") for part in summary if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _text(content: Any, where: str) -> str:
    """Return text, or the texts of parts put together.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"{where} must be text or a non-empty list of parts, got {shortened(content)}",
            param=where,
        )
    texts: list[str] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if kind != "refusal" and kind not in TEXT_PARTS:
            raise RequestError(
                f"{place}: parts of type {shortened(kind)} are not supported; only text is",
                param=place,
            )
        texts.append(_string(part, name, place))
    return "".join(texts)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(
            f"{where}.{name} must be a string, got {shortened(value)}", param=f"{where}.{name}"
        )
    return value
