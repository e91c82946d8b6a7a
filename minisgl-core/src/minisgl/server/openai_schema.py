"""What clients may send: OpenAI's fields, the usual extensions, and what is refused by name.

Three kinds of fields: known ones are validated; known ones that minisgl does not offer yet are
refused unless they hold the value that asks for nothing; unknown ones are accepted with one
warning a name. ``null`` means that a field is absent, as OpenAI documents.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minisgl.errors import RequestError, nearest
from minisgl.request import MAX_CACHE_SALT, MAX_PRIORITY, SamplingParams
from minisgl.server.client import Prompt

logger = logging.getLogger(__name__)

MAX_PROMPTS: Final = 1024
MAX_WARNED_NAMES: Final = 200
DEFAULT_COMPLETION_TOKENS: Final = 16
"""``max_tokens`` of ``/v1/completions`` when absent, as OpenAI documents."""

NEUTRAL_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "lora_path": (),
    "store": (False,),
    "return_token_ids": (False,),
}
"""Fields that are known and not offered yet, with the values that ask for nothing."""

WITHOUT_EFFECT: Final = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"}
)
"""Labels for accounting: accepted, and rightly without any effect on the answer."""

RequestT = TypeVar("RequestT", bound="GenerationRequest")


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class GenerationRequest(BaseModel):
    """The fields that both endpoints share; ranges are checked by ``SamplingParams``."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)

    max_tokens_field: ClassVar[str] = "max_tokens"

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """A higher number is served earlier, and retracted later when the KV pool is full."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """Only requests with the same one share cached prefixes."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self) -> SamplingParams:
        """Return the validated sampling parameters.

        Raises:
            RequestError: one is outside its range.
        """
        return self._params(self.max_tokens)

    def _params(self, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True

    def texts(self) -> Iterator[str]:
        """Yield the texts of all messages, as far as they are well-formed."""
        for message in self.messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else [{"text": content}]:
                text = part.get("text") if isinstance(part, dict) else None
                if isinstance(text, str):
                    yield text

    def sampling_params(self) -> SamplingParams:
        """Return the parameters; without a limit, the answer may take all the room that is left."""
        if self.max_completion_tokens is None:
            return self._params(self.max_tokens)
        try:
            return self._params(self.max_completion_tokens)
        except RequestError as error:
            if error.param != "max_tokens":
                raise
            name = "max_completion_tokens"
            raise RequestError(error.message.replace("max_tokens", name), param=name) from error


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Any

    def sampling_params(self) -> SamplingParams:
        """Return the parameters; without a limit, OpenAI's documented default applies."""
        absent = self.max_tokens is None
        return self._params(
            max(DEFAULT_COMPLETION_TOKENS, self.min_tokens) if absent else self.max_tokens
        )

    def prompts(self) -> list[Prompt]:
        """Return the prompts: one, or each of a batch.

        Raises:
            RequestError: ``prompt`` is none of text, token ids, or a list of either.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(part, str) for part in prompt) or all(map(_is_ids, prompt)):
                if len(prompt) > MAX_PROMPTS:
                    raise RequestError(
                        f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}",
                        param="prompt",
                    )
                return prompt
            if _is_ids(prompt):
                return [prompt]
        raise RequestError(
            "prompt must be text, a non-empty list of token ids, or a non-empty list of either, "
            f"got {_shortened(prompt)}",
            param="prompt",
        )


class RequestParser:
    """Turns request bodies into models; remembers which unknown fields it has warned about."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def parse(self, body: bytes, model: type[RequestT]) -> RequestT:
        """Return the request in ``body``.

        Raises:
            RequestError: the body is no JSON object, a field is wrong, or is not offered yet.
        """
        fields = {name: value for name, value in _object(body).items() if value is not None}
        for name, neutral in NEUTRAL_VALUES.items():
            if name in fields and not any(_equal(fields[name], value) for value in neutral):
                raise RequestError(
                    f"{name}={_shortened(fields[name])} is not supported yet", param=name
                )
        try:
            request = model.model_validate(fields)
        except ValidationError as error:
            raise _first_error(error) from error
        if request.stream_options is not None and not request.stream:
            raise RequestError(
                "stream_options is only allowed when stream is true", param="stream_options"
            )
        self._warn_unknown(request)
        return request

    def _warn_unknown(self, request: Self | GenerationRequest) -> None:
        known = type(request).model_fields  # type: ignore[union-attr]
        for name in request.model_extra or {}:  # type: ignore[union-attr]
            if name in NEUTRAL_VALUES or name in WITHOUT_EFFECT or name in self._warned:
                continue
            if len(self._warned) < MAX_WARNED_NAMES:
                self._warned.add(name)
                logger.warning(
                    "ignoring the unknown request field %s.%s",
                    _shortened(name),
                    nearest(name[:80], known),
                )


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that ``body`` holds."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(
            f"the request body must be a JSON object, got {_shortened(value)}",
        )
    return value


def _first_error(error: ValidationError) -> RequestError:
    """Return pydantic's first complaint as a request error that names the field."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part))
    if first["type"] == "missing":
        return RequestError(f"{path} is required", param=path)
    return RequestError(f"{path}: {first['msg']}, got {_shortened(first['input'])}", param=path)


def _is_union_branch(part: object) -> bool:
    """Return whether a step of pydantic's error path names a type of a union, not a field."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(part) is int for part in value)


def _equal(value: object, neutral: object) -> bool:
    """Return equality that keeps ``False`` apart from 0 and ``True`` from 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _shortened(value: object) -> str:
    """Return ``repr(value)``, cut to what an error message should quote."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
