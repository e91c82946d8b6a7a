"""What answers look like, for ``/openapi.json``; tests hold real answers against these.

Answers are built from plain dictionaries and bytes: validating each chunk would cost more than
making it.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    """Base of all answers: these have no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class ErrorDetail(AnswerModel):
    """What is wrong."""

    message: str
    """What is wrong, the value, and what is allowed."""
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    """The field at fault, if it is one field's."""
    code: str | None
    """A short machine-readable reason."""


class ErrorBody(AnswerModel):
    """Every error."""

    error: ErrorDetail


class AnthropicErrorDetail(AnswerModel):
    """What is wrong."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "api_error",
    ]
    message: str


class AnthropicError(AnswerModel):
    """Every error below ``/v1/messages``."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class PromptTokensDetails(AnswerModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Supplied by the prefix cache."""


class CompletionTokensDetails(AnswerModel):
    """What the generated tokens were."""

    reasoning_tokens: int
    """Of reasoning; counted in whole increments."""


class UsageCounts(AnswerModel):
    """Token counts; a prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class LogprobEntry(AnswerModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The token's exact bytes: it may be a part of a character."""


class ChatLogprobEntry(LogprobEntry):
    """A token of the answer, and the likeliest ones at its place."""

    top_logprobs: list[LogprobEntry]


class ChatLogprobs(AnswerModel):
    """Log-probabilities of a chat answer."""

    content: list[ChatLogprobEntry]
    refusal: None


class CompletionLogprobsObject(AnswerModel):
    """Log-probabilities of a text answer; the first token of an echoed prompt has ``null``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(AnswerModel):
    """A token that could have stood at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]


class CalledFunction(AnswerModel):
    """The function of a tool call."""

    name: str
    arguments: str
    """JSON text."""


class ToolCall(AnswerModel):
    """A tool that the model wants to be called."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(AnswerModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same as ``reasoning_content``."""
    tool_calls: list[ToolCall] | None = None


FinishReasonName = Literal["stop", "length", "tool_calls", "abort"]


class ChatChoice(AnswerModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    token_ids: list[int] | None = None


class ChatCompletion(AnswerModel):
    """A whole chat answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageCounts
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None


class CalledFunctionPiece(AnswerModel):
    """More of a function's call."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(AnswerModel):
    """More of a tool call; the first piece has ``id``, ``type`` and the name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionPiece


class ChatDelta(AnswerModel):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatChunkChoice(AnswerModel):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(AnswerModel):
    """One event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageCounts | None = None
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(AnswerModel):
    """One text; in a stream, a piece of it, and a reason only in its last one."""

    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: FinishReasonName | None
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(AnswerModel):
    """A whole text answer, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageCounts | None = None


class ModelCard(AnswerModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """Most tokens of prompt and answer together."""


class ModelList(AnswerModel):
    """What this server serves: one model."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(AnswerModel):
    """The server can serve; the numbers are those of the scheduler's last heartbeat."""

    status: Literal["ok"]
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_steps: int


class Version(AnswerModel):
    """The server's version."""

    version: str


class TokenizeAnswer(AnswerModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: None


class DetokenizeAnswer(AnswerModel):
    """The text of tokens."""

    prompt: str
