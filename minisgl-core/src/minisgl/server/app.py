"""The HTTP application: its routes and what surrounds them. Knows the engine only as a client."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from minisgl.errors import RequestError
from minisgl.server.anthropic.routes import add_anthropic_routes
from minisgl.server.chat.service import ChatService
from minisgl.server.client import EngineClient
from minisgl.server.errors import (
    ANTHROPIC_ID_HEADER,
    REQUEST_ID_HEADER,
    error_response,
    install_error_handlers,
)
from minisgl.server.fields import RequestParser
from minisgl.server.metrics import EngineMetrics, HttpMetrics
from minisgl.server.middleware import ApiKeyMiddleware, BodyMiddleware, RequestMiddleware
from minisgl.server.openai.routes import add_openai_routes
from minisgl.server.openapi import ApiPage
from minisgl.server.responses.routes import add_responses_routes
from minisgl.server.route_docs import ROUTE_DOCS
from minisgl.server.served_model import ServedModel
from minisgl.server.tokens import add_token_routes

MAX_BODY_BYTES: Final = 16 * 2**20
"""Largest request body; one of token ids for a context of a million still fits."""


def create_app(
    client: EngineClient,
    model: ServedModel,
    *,
    api_keys: Sequence[str] = (),
    strict_requests: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    cors_allow_origins: Sequence[str] = (),
    num_dropped: Callable[[], Mapping[str, int]] = dict,
) -> FastAPI:
    """Return the application; every error it answers has its protocol's form.

    Args:
        client: the way to the engine.
        model: what is served.
        api_keys: requests must carry one of them, if there are any.
        strict_requests: unknown request fields are refused, instead of warned about.
        max_body_bytes: of one request.
        cors_allow_origins: web sites whose pages may read answers.
        num_dropped: returns, by process, how many messages between processes were none.
    """
    app = FastAPI(title="minisgl", version=version("minisgl-core"))
    install_error_handlers(app)
    app.add_middleware(BodyMiddleware, max_bytes=max_body_bytes)
    if api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=api_keys)
    if cors_allow_origins:  # outside of the keys: a browser asks first, without one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, ANTHROPIC_ID_HEADER, "Retry-After"],
        )
    metrics = EngineMetrics(model.name, lambda: client.heartbeat.last, num_dropped)
    client.observer = metrics
    app.add_middleware(RequestMiddleware, metrics=HttpMetrics(metrics.registry))
    _add_metrics_route(app, metrics)
    _add_status_routes(app, client, model)
    parser = RequestParser(strict=strict_requests)
    service = ChatService(client=client, model=model, parser=parser)
    add_openai_routes(app, service)
    add_responses_routes(app, service)
    add_anthropic_routes(app, service)
    add_token_routes(app, client, model, parser)
    # FastAPI documents itself through this method; it is meant to be replaced.
    app.openapi = ApiPage(app, ROUTE_DOCS, strict=strict_requests).build  # type: ignore[method-assign]
    return app


def _add_metrics_route(app: FastAPI, metrics: EngineMetrics) -> None:
    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})


def _add_status_routes(app: FastAPI, client: EngineClient, model: ServedModel) -> None:
    @app.get("/health")
    async def health() -> Response:
        reason = client.why_unhealthy()
        if reason is not None:
            return error_response(RequestError(reason, status=503, code="unhealthy"))
        return JSONResponse({"status": "ok", **client.heartbeat.load()})

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
