"""Request bodies to models, for every protocol alike.

Three kinds of fields: known ones are validated; known ones that minisgl does not offer are refused
by name, with the reason, unless they hold a value that asks for nothing; unknown ones are accepted
with one warning a name, or refused if the server is strict. ``null`` means that a field is absent,
as OpenAI documents.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from minisgl.errors import RequestError, nearest

logger = logging.getLogger(__name__)

MAX_WARNED_NAMES: Final = 200
MAX_QUOTED_VALUE: Final = 80
MAX_SECONDS: Final = 86400

RequestT = TypeVar("RequestT", bound="RequestModel")


@dataclass(frozen=True, slots=True)
class NotOffered:
    """A field that is known and not offered: of a body, or as an annotation of one inside it.

    Attributes:
        reason: ends the sentence "``name`` is not offered: ...".
        neutral: the values that ask for nothing, which are accepted.
    """

    reason: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: object) -> bool:
        """Return whether ``value`` asks for nothing; ``False`` is not 0, and ``True`` not 1."""
        return any(
            isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
            for neutral in self.neutral
        )

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the field."""
        said = f"Not offered: {self.reason}. Only these values are accepted."
        return {"enum": [*self.neutral, None], "description": said}

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(Any))

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.schema()

    def _check(self, value: object) -> object:
        if self.accepts(value):
            return value
        raise PydanticCustomError(
            "not_offered", "is not offered: {reason}", {"reason": self.reason}
        )


class RequestModel(BaseModel):
    """Base of all request bodies; the text below a field describes it in ``/openapi.json``."""

    model_config = ConfigDict(
        extra="allow", strict=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    not_offered: ClassVar[Mapping[str, NotOffered]] = {}


Timeout = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
"""Seconds that an answer may take."""


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that also takes ``null``, which means that the field is absent."""
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    about = {"default", "description", "title"}
    outside = {key: value for key, value in schema.items() if key in about}
    inside = {key: value for key, value in schema.items() if key not in about}
    return {"anyOf": [inside, {"type": "null"}], **outside}


def _document_nulls(schema: dict[str, Any]) -> None:
    """Let the schema of an object take ``null`` for each field that may be absent."""
    required = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        if name not in required:
            schema["properties"][name] = or_null(inner)


class Nested(BaseModel):
    """Base of objects inside request bodies: these refuse what they do not know.

    ``null`` is absent here, too.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        json_schema_extra=_document_nulls,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: inner for name, inner in value.items() if inner is not None}


class RequestParser:
    """Turns request bodies into models; remembers which unknown fields it has warned about.

    Args:
        strict: refuse unknown fields.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._warned: set[str] = set()

    def parse(self, body: bytes, model: type[RequestT]) -> RequestT:
        """Return the request in ``body``.

        Raises:
            RequestError: the body is no JSON object, a field is wrong, or is not offered.
        """
        fields = {name: value for name, value in _object(body).items() if value is not None}
        for name, refused in model.not_offered.items():
            if name in fields and not refused.accepts(fields[name]):
                raise RequestError(
                    f"{name}={shortened(fields[name])} is not offered: {refused.reason}",
                    param=name,
                )
        try:
            request = model.model_validate(fields)
        except ValidationError as error:
            raise request_error(error, fields, model) from error
        self._judge_unknown(request, model)
        return request

    def _judge_unknown(self, request: RequestModel, model: type[RequestModel]) -> None:
        for name in request.model_extra or {}:
            if name in model.not_offered or (name in self._warned and not self._strict):
                continue
            hint = nearest(name[:MAX_QUOTED_VALUE], model.model_fields)
            if self._strict:
                raise RequestError(
                    f"unknown field {shortened(name)}: this server is strict "
                    f"(--strict-requests).{hint}",
                    param=name,
                )
            if len(self._warned) < MAX_WARNED_NAMES:
                self._warned.add(name)
                logger.warning("ignoring the unknown request field %s.%s", shortened(name), hint)


def shortened(value: object) -> str:
    """Return ``repr(value)``, cut to what an error message should quote."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_VALUE else f"{text[: MAX_QUOTED_VALUE - 3]}..."


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that ``body`` holds."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(
            f"the request body must be a JSON object, got {shortened(value)}",
        )
    return value


def request_error(
    error: ValidationError, fields: dict[str, Any], model: type[BaseModel]
) -> RequestError:
    """Return pydantic's complaints about one field as a request error that names it.

    A union complains once a branch; what all of them expect is put together.

    Args:
        error: of validating ``fields``.
        fields: of the request.
        model: that they were validated against.
    """
    complaints = error.errors(include_url=False, include_context=False)
    first = complaints[0]
    path = _path(first, fields)
    if first["type"] == "missing":
        return RequestError(f"{path} is required", param=path)
    if first["type"] == "not_offered":
        return RequestError(f"{path}={shortened(first['input'])} {first['msg']}", param=path)
    if first["type"] == "extra_forbidden":
        return RequestError(f"{path} is unknown, got {shortened(first['input'])}", param=path)
    wishes = [_wish(entry, model) for entry in complaints if _path(entry, fields) == path]
    wish = "; or: ".join(dict.fromkeys(wishes))
    return RequestError(f"{path}: {wish}, got {shortened(first['input'])}", param=path)


def _wish(complaint: ErrorDetails, model: type[BaseModel]) -> str:
    """Return what a complaint asks for; of a number outside its range, the whole range."""
    if complaint["type"] in {"too_short", "string_too_short"}:  # no field here needs more than one
        return "must not be empty"
    name, *rest = complaint["loc"]
    if complaint["type"] in {"greater_than_equal", "less_than_equal"} and not rest:
        limits = model.model_fields[str(name)].metadata
        low = next((limit.ge for limit in limits if hasattr(limit, "ge")), None)
        high = next((limit.le for limit in limits if hasattr(limit, "le")), None)
        if low is not None and high is not None:
            return f"must be from {low} to {high}"
    return complaint["msg"]


def _path(complaint: ErrorDetails, fields: dict[str, Any]) -> str:
    """Return the way through the body to what is wrong, without the names of union branches."""
    path = ""
    value: Any = fields
    location = complaint["loc"]
    for number, part in enumerate(location):
        is_missing = complaint["type"] == "missing" and number == len(location) - 1
        if (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        ):
            value = value[part]  # type: ignore[index]  # pydantic's parts are its own keys
        elif not is_missing:
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
