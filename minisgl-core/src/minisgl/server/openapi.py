"""``/openapi.json``: made from the very models that parse requests, so that it is true."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from minisgl.server.answer_models import AnthropicError, ErrorBody
from minisgl.server.errors import is_anthropic
from minisgl.server.fields import RequestModel, or_null

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_REF: Final = "#/components/schemas/{model}"

_ERRORS: Final[Mapping[int, str]] = {
    400: "A field is wrong, unknown to a strict server, or not offered; `param` names it.",
    401: "The key is missing or wrong.",
    404: "This server has no model of that name.",
    408: "The body stopped coming.",
    413: "The body is larger than `server.max_body_bytes`.",
    429: "Too much waits already; `Retry-After` says when to come back.",
    500: "The server has failed.",
    503: "The server is starting or shutting down; `Retry-After` says when to come back.",
    504: "The answer was not complete within `timeout` seconds.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDoc:
    """What the page says about one route.

    Attributes:
        path, method: of the route.
        summary: one sentence.
        body: what it takes, if it takes anything.
        answer: what it returns; ``None`` where it is no JSON.
        events: what the data of a stream's events may be, if the route can stream.
        ends_with_done: whether the last event of a stream is ``[DONE]``.
        errors: statuses of refusals.
        content_type: of the answer.
    """

    path: str
    method: str = "post"
    summary: str
    body: type[RequestModel] | None = None
    answer: type[BaseModel] | None = None
    events: Sequence[type[BaseModel]] = ()
    ends_with_done: bool = False
    errors: Sequence[int] = field(default=(400, 401, 404, 408, 413, 429, 500, 503, 504))
    content_type: str = JSON


class ApiPage:
    """Builds the page of one application.

    Args:
        app: its routes.
        docs: of each route.
        strict: whether the server refuses unknown fields.
    """

    def __init__(self, app: FastAPI, docs: Sequence[RouteDoc], *, strict: bool) -> None:
        self._app = app
        self._docs = docs
        self._strict = strict
        self._built: dict[str, Any] | None = None

    def build(self) -> dict[str, Any]:
        """Return the page; it is built once."""
        if self._built is None:
            self._built = self._build()
        return self._built

    def _build(self) -> dict[str, Any]:
        page = get_openapi(
            title=self._app.title,
            version=self._app.version,
            summary="OpenAI-compatible server",
            routes=self._app.routes,
        )
        found = page.get("components", {}).get("schemas", {})  # of routes that plugins add
        page["components"] = {
            "schemas": {**found, **_as_markdown(self._schemas())},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        }
        for doc in self._docs:
            operation = page["paths"][doc.path][doc.method]
            operation["summary"] = doc.summary
            operation["responses"] = _responses(doc)
            if doc.body is not None:
                operation["requestBody"] = {
                    "required": True,
                    "content": {JSON: {"schema": _ref(doc.body)}},
                }
            if doc.path != "/health":
                operation["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
        return page

    def _schemas(self) -> dict[str, Any]:
        bodies = [doc.body for doc in self._docs if doc.body is not None]
        answers = [
            model for doc in self._docs for model in (doc.answer, *doc.events) if model is not None
        ]
        schemas: dict[str, Any] = {}
        for mode, models in (
            ("validation", bodies),
            ("serialization", [*answers, ErrorBody, AnthropicError]),
        ):
            _, found = models_json_schema(
                [(model, mode) for model in models],  # type: ignore[misc]  # mode is a Literal
                ref_template=_REF,
            )
            schemas |= found["$defs"]
        for body in bodies:
            schemas[body.__name__] = _body_schema(schemas[body.__name__], body, strict=self._strict)
        return schemas


def _body_schema(
    schema: dict[str, Any], model: type[RequestModel], *, strict: bool
) -> dict[str, Any]:
    """Return pydantic's schema of a body, with what is not offered and with ``null`` for absent."""
    required = set(schema.get("required", ()))
    properties = {
        name: inner if name in required else or_null(inner)
        for name, inner in schema["properties"].items()
    }
    for name, refused in model.not_offered.items():
        properties[name] = refused.schema()
    return {**schema, "properties": properties, "additionalProperties": not strict}


def _responses(doc: RouteDoc) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if doc.content_type != JSON:
        content[doc.content_type] = {"schema": {"type": "string"}}
    else:
        content[JSON] = {"schema": {} if doc.answer is None else _ref(doc.answer)}
    if doc.events:
        content[EVENTS] = {"schema": _event_schema(doc)}
    error = _ref(AnthropicError if is_anthropic(doc.path) else ErrorBody)
    return {
        "200": {
            "description": "The answer; with `stream`, server-sent events."
            if EVENTS in content
            else "The answer.",
            "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
            "content": content,
        },
        **{
            str(status): {
                "description": f"{HTTPStatus(status).phrase}. {_ERRORS[status]}",
                "content": {JSON: {"schema": error}},
            }
            for status in doc.errors
        },
    }


def _event_schema(doc: RouteDoc) -> dict[str, Any]:
    said = "What the `data` of an event holds, as JSON."
    if doc.ends_with_done:
        said += " That of the last one of a stream without an error is `[DONE]`."
    if len(doc.events) == 1:
        return {**_ref(doc.events[0]), "description": said}
    return {"anyOf": [_ref(model) for model in doc.events], "description": said}


def _as_markdown(value: Any) -> Any:
    """Return JSON whose descriptions are Markdown: docstrings are written otherwise."""
    if isinstance(value, list):
        return [_as_markdown(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inner.replace("``", "`").replace("\n", " ")
        if key == "description" and isinstance(inner, str)
        else _as_markdown(inner)
        for key, inner in value.items()
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
