"""The HTTP routes. Knows the engine only as an ``EngineClient``."""

import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import RequestError
from minisgl.request import SamplingParams
from minisgl.server.client import EngineClient, Prompt
from minisgl.server.errors import (
    CLIENT_CLOSED_REQUEST,
    error_response,
    install_error_handlers,
)
from minisgl.server.openai_responses import Answer, ChatAnswer, CompletionAnswer
from minisgl.server.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestParser,
)
from minisgl.server.streaming import ClientGoneError, EventStreamResponse, unless_disconnected

MAX_BODY_BYTES = 16 * 2**20
"""Largest request body; one of token ids for a context of a million still fits."""


@dataclass(slots=True)
class ServedModel:
    """The model as clients see it.

    Attributes:
        name: what ``/v1/models`` lists and requests may name.
        max_seq_len: most tokens of one sequence; known once the model is loaded.
        max_chars_per_token: most characters that one token stands for; likewise.
        created: Unix time of the start, in seconds.
    """

    name: str
    max_seq_len: int | None = None
    max_chars_per_token: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def card(self) -> dict[str, Any]:
        """Return the entry of ``/v1/models``."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "minisgl",
            "max_model_len": self.max_seq_len,
        }

    def check_name(self, name: str | None) -> None:
        """Refuse another model's name with 404; no name means this model."""
        if name is not None and name != self.name:
            raise RequestError(
                f"the model {name!r} does not exist; this server has {self.name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def check_length(self, text: str, param: str) -> None:
        """Refuse text that must be too long before the tokenizer, which all share, works on it."""
        if self.max_seq_len is None or self.max_chars_per_token is None:
            return
        limit = self.max_seq_len * self.max_chars_per_token
        if len(text) > limit:
            raise RequestError(
                f"{param} has {len(text)} characters; this server takes at most "
                f"{self.max_seq_len} tokens, which are never more than {limit} characters",
                param=param,
                code="context_length_exceeded",
            )


class ApiKeyMiddleware:
    """Refuses requests without the key, on every route but ``/health``."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        refusal = error_response(
            RequestError(
                "a valid key is needed: send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            ),
            {"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                return scheme.lower() == b"bearer" and hmac.compare_digest(
                    key.strip(), self._expected
                )
        return False


def create_app(client: EngineClient, model: ServedModel, *, api_key: str | None = None) -> FastAPI:
    """Return the application; every error it answers has OpenAI's form."""
    app = FastAPI(title="minisgl", version=version("minisgl-core"))
    install_error_handlers(app)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)
    _add_status_routes(app, client, model)
    _add_generation_routes(app, client, model)
    return app


def _add_status_routes(app: FastAPI, client: EngineClient, model: ServedModel) -> None:
    @app.get("/health")
    async def health() -> Response:
        reason = client.why_unhealthy()
        if reason is not None:
            return error_response(RequestError(reason, status=503, code="unhealthy"))
        return JSONResponse({"status": "ok", **client.load()})

    @app.get("/version")
    async def package_version() -> dict[str, str]:
        return {"version": version("minisgl-core")}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card()]}

    @app.get("/v1/models/{name:path}")
    async def model_card(name: str) -> dict[str, Any]:
        model.check_name(name)
        return model.card()


def _add_generation_routes(app: FastAPI, client: EngineClient, model: ServedModel) -> None:
    parser = RequestParser()

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = parser.parse(await _body(request), ChatRequest)
        model.check_name(asked.model)
        for text in asked.texts():
            model.check_length(text, "messages")
        answer = ChatAnswer(model.name, include_usage=asked.include_usage)
        return await _respond(
            client,
            request,
            asked,
            [asked.messages],
            answer,
            template_kwargs=asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
        )

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parser.parse(await _body(request), CompletionRequest)
        model.check_name(asked.model)
        prompts = asked.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                model.check_length(prompt, "prompt")
        answer = CompletionAnswer(model.name, len(prompts), asked.include_usage)
        return await _respond(client, request, asked, prompts, answer)


async def _body(request: Request) -> bytes:
    """Return the request's body.

    Raises:
        RequestError: it is larger than what any request needs.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                f"the request body is larger than {MAX_BODY_BYTES} bytes",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                code="request_too_large",
            )
    return bytes(body)


async def _respond(
    client: EngineClient,
    request: Request,
    asked: GenerationRequest,
    prompts: Sequence[Prompt],
    answer: Answer,
    **chat_options: Any,
) -> Response:
    """Run the request and return its answer, whole or as a stream.

    The stream's status line waits for the first reply, so that a refusal is still a 400.
    """
    params: SamplingParams = asked.sampling_params()
    generation = client.generate(
        prompts,
        params,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        **chat_options,
    )
    streaming = False
    try:
        if not asked.stream:
            body = await unless_disconnected(request.receive, answer.collect(generation))
            return JSONResponse(body)
        await unless_disconnected(request.receive, generation.first())
        streaming = True
        return EventStreamResponse(answer.events(generation), generation)
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not streaming:
            generation.close()
