"""From another protocol's request to a chat request."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from minisgl.server.fields import request_error
from minisgl.server.openai.chat_request import ChatRequest


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the chat request with these fields, those that are ``None`` left out.

    Raises:
        RequestError: a value is not what a chat takes.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise request_error(error, given, ChatRequest) from error
