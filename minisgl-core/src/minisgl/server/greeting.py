"""What the server says when it is ready."""

import json
import shlex
from importlib.metadata import version
from typing import Any

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - read, not bound


def greeting(
    host: str, port: int, model: str, *, has_key: bool, can_chat: bool, has_tls: bool = False
) -> str:
    """Return the address, and a ``curl`` line that works as it is.

    Args:
        host: that the server listens on; all interfaces are shown as this machine's own address.
        port: that it listens on.
        model: name in the API.
        has_key: whether requests need a key; the line then reads ``MINISGL_SERVER__API_KEY``.
        can_chat: whether the model has a chat template.
        has_tls: whether the server speaks HTTPS.
    """
    name = ANY_ADDRESS.get(host, host)
    url = f"{'https' if has_tls else 'http'}://{f'[{name}]' if ':' in name else name}:{port}"
    question = "What is the capital of France?"
    body: dict[str, Any] = {"model": model, "max_tokens": 64, "temperature": 0} | (
        {"messages": [{"role": "user", "content": question}]}
        if can_chat
        else {"prompt": "The capital of France is"}
    )
    route = "/v1/chat/completions" if can_chat else "/v1/completions"
    key = '-H "Authorization: Bearer $MINISGL_SERVER__API_KEY" ' if has_key else ""
    curl = (
        f"curl {shlex.quote(url + route)} -H 'Content-Type: application/json' "
        f"{key}-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )
    return f"minisgl {version('minisgl-core')} serves {model} on {url}\nTry it:\n  {curl}"
