"""The clients that OpenAI and Anthropic publish, against an in-process server."""

from typing import Any

import anthropic
import httpx2
import openai

from support.in_process_engine import Served


def openai_client(server: Served, **options: Any) -> openai.AsyncOpenAI:
    """OpenAI's client; errors are not tried again."""
    return openai.AsyncOpenAI(
        base_url="http://server/v1",
        api_key=options.pop("api_key", "none"),
        http_client=_http(server),
        max_retries=0,
        **options,
    )


def anthropic_client(server: Served, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's client; errors are not tried again."""
    return anthropic.AsyncAnthropic(
        base_url="http://server",
        api_key=options.pop("api_key", "none"),
        http_client=_http(server),
        max_retries=0,
        **options,
    )


def _http(server: Served) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=server.app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://server")
