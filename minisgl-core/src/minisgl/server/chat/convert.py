"""From another protocol's request to a chat request, and errors back into that protocol's words."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from minisgl.errors import RequestError
from minisgl.server.fields import request_error
from minisgl.server.openai.chat_request import ChatRequest


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name fields as the client does.

    Args:
        names: the client's names, by those of a chat request.
    """
    try:
        yield
    except RequestError as error:
        field, dot, rest = (error.param or "").partition(".")
        name = names.get(field)
        if name is None:
            raise
        message = error.message.replace(field, name, 1)
        raise RequestError(
            message, param=f"{name}{dot}{rest}", status=error.status, code=error.code
        ) from error


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the chat request with these fields, those that are ``None`` left out.

    Raises:
        RequestError: a value is not what a chat takes.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise request_error(error, given) from error
