"""Chat messages as OpenAI's clients send them, into the form that chat templates expect.

What is malformed ends as a ``RequestError`` that names the field. A role or a field that is unknown
here passes: the template decides.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from minisgl.errors import RequestError

TEXT_PARTS: Final = {"text": "text", "refusal": "refusal"}
"""Kinds of content parts, and the field that holds the text of each."""


def check_messages(messages: Sequence[Any], *, developer_role: str) -> list[dict[str, Any]]:
    """Return ``messages`` as templates want them; the caller's objects are not changed.

    Every message has a role, and its content as one string: ``null`` is empty, text parts are put
    together as they are, an assistant's ``refusal`` stands for missing content. ``function_call``
    and the role ``function`` become tool calls and ``tool``. Arguments of tool calls become objects
    where they are JSON objects; ``reasoning`` is ``reasoning_content``, too.

    Args:
        messages: whatever was sent.
        developer_role: the role that the template knows for ``developer``.

    Raises:
        RequestError: a message is malformed.
    """
    return [
        _checked(message, f"messages[{i}]", developer_role) for i, message in enumerate(messages)
    ]


def with_argument_strings(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return checked messages with the arguments of tool calls as JSON text."""
    changed = [dict(message) for message in messages]
    for message in changed:
        if "tool_calls" in message:
            message["tool_calls"] = [
                call | {"function": _with_string(call["function"])}
                for call in message["tool_calls"]
            ]
    return changed


def with_content_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return checked messages with their content as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def _with_string(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _checked(message: Any, where: str, developer_role: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _error(where, f"must be an object, got {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _error(f"{where}.role", f"must be a non-empty string, got {role!r}")
    if message.get("audio"):
        raise _error(f"{where}.audio", "cannot be served: this server takes text only")
    checked = {key: value for key, value in message.items() if value is not None}
    checked.pop("audio", None)
    checked["role"] = {"developer": developer_role, "function": "tool"}.get(role, role)
    for name in ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content"):
        if not isinstance(checked.get(name, ""), str):
            raise _error(f"{where}.{name}", f"must be a string, got {checked[name]!r}")
    _take_tool_calls(checked, where)
    if "reasoning" in checked:
        checked.setdefault("reasoning_content", checked["reasoning"])
    refusal = checked.pop("refusal", "")
    content = message.get("content")
    speaks = refusal or "tool_calls" in checked or "reasoning_content" in checked
    if content in (None, "", []) and (content == "" or (role == "assistant" and speaks)):
        checked["content"] = refusal
    else:
        checked["content"] = _joined(content, f"{where}.content")
    return checked


def _take_tool_calls(message: dict[str, Any], where: str) -> None:
    """Check ``tool_calls`` and put an old ``function_call`` among them."""
    calls = message.pop("tool_calls", [])
    where_calls = f"{where}.tool_calls"
    if "function_call" in message:
        calls, where_calls = [{"function": message.pop("function_call")}], f"{where}.function_call"
    if not isinstance(calls, list):
        raise _error(where_calls, f"must be a list, got {calls!r}")
    if not calls:
        return
    if message["role"] != "assistant":
        raise _error(where_calls, f"belongs to the role 'assistant', not {message['role']!r}")
    message["tool_calls"] = [_call(call, f"{where_calls}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _error(where, f"must be an object with a 'function', got {call!r}")
    kind = call.get("type", "function")
    if kind != "function":
        raise _error(f"{where}.type", f"must be 'function', got {kind!r}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _error(f"{where}.function.name", f"must be a non-empty string, got {name!r}")
    if not isinstance(call.get("id", ""), str):
        raise _error(f"{where}.id", f"must be a string, got {call['id']!r}")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """Return arguments as an object; text that is no JSON object stays text."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise _error(where, f"must be JSON text or an object, got {arguments!r}")
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _joined(content: Any, where: str) -> str:
    """Return a message's content as one string; its text parts are put together as they are."""
    if isinstance(content, str):
        return content
    if content == []:
        raise _error(where, "must hold at least one text part, got []; an empty text is ''")
    if not isinstance(content, list):
        raise _error(where, f"must be a string or a list of text parts, got {content!r}")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise _error(
                where,
                f"may only hold parts of type 'text', got {kind or part!r}: "
                "images, audio and files are not supported",
            )
        if not isinstance(part.get(field), str):
            raise _error(where, f"{field!r} of a part must be a string, got {part.get(field)!r}")
        texts.append(part[field])
    return "".join(texts)


def _error(where: str, what: str) -> RequestError:
    """Return the refusal of a field; long values are cut."""
    text = what if len(what) <= 400 else f"{what[:400]}..."
    return RequestError(f"{where} {text}", param=where)
