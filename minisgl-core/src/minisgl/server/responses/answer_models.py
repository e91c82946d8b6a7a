"""What ``/v1/responses`` returns, for ``/openapi.json``; tests hold real answers against these."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from minisgl.server.answer_models import AnswerModel, ChatLogprobEntry

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    """Always empty."""
    logprobs: list[ChatLogprobEntry]
    """Of the text, if ``include`` asks for them."""


class OutputReasoningText(AnswerModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(AnswerModel):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(AnswerModel):
    """Reasoning, as it is: there is no summary of it."""

    id: str
    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    """Always empty."""
    content: list[OutputReasoningText]
    status: ItemStatus


class OutputFunctionCall(AnswerModel):
    """A function that the model wants to be called."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    """What the output of the call must name."""
    name: str
    arguments: str
    """JSON text."""


OutputItemModel = Annotated[
    OutputMessage | OutputReasoning | OutputFunctionCall, Field(discriminator="type")
]


class ResponseFailure(AnswerModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None
    """The field at fault, if it is one field's."""


class IncompleteDetails(AnswerModel):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class EchoedReasoning(AnswerModel):
    """What was asked about reasoning."""

    effort: str | None
    summary: None


class EchoedText(AnswerModel):
    """What was asked about the text."""

    format: dict[str, Any]
    """As it was asked for."""


class EchoedTool(AnswerModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    output_schema: dict[str, Any] | None = None


class InputTokensDetails(AnswerModel):
    """Where the input's tokens came from."""

    cached_tokens: int
    """Supplied by the prefix cache."""
    cache_write_tokens: int
    """Always 0: what is computed is kept in any case, and counts as computed."""


class OutputTokensDetails(AnswerModel):
    """What the generated tokens were."""

    reasoning_tokens: int
    """Of reasoning; counted in whole increments."""


class ResponseUsage(AnswerModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(AnswerModel):
    """A response, whole or on its way."""

    id: str
    object: Literal["response"]
    created_at: int
    """Unix time in seconds."""
    completed_at: int | None
    """The same, of its end, if it has ended by itself."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItemModel]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: EchoedText
    tool_choice: str | dict[str, Any]
    tools: list[EchoedTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class _Event(AnswerModel):
    """Base of the events of a stream."""

    sequence_number: int
    """From 0, without gaps."""


class ResponseEvent(_Event):
    """The response begins, or has ended."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(_Event):
    """An item begins, or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItemModel


class _PlacedEvent(_Event):
    """Base of the events within an item."""

    item_id: str
    output_index: int


class PartEvent(_PlacedEvent):
    """The text of an item begins, or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[OutputText | OutputReasoningText, Field(discriminator="type")]


class TextDeltaEvent(_PlacedEvent):
    """More text of a message."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[ChatLogprobEntry]


class TextDoneEvent(_PlacedEvent):
    """The whole text of a message."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[ChatLogprobEntry]


class ReasoningDeltaEvent(_PlacedEvent):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDoneEvent(_PlacedEvent):
    """The whole text of reasoning."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDeltaEvent(_PlacedEvent):
    """More of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_PlacedEvent):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(_Event):
    """What went wrong on the way; ``response.failed`` follows."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


class ResponseStreamEvent(
    RootModel[
        Annotated[
            ResponseEvent
            | ItemEvent
            | PartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ReasoningDeltaEvent
            | ReasoningDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent
            | ErrorEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a response's stream; its name is its ``type``."""
