"""What ``/v1/messages`` returns, for ``/openapi.json``; tests hold real answers against these."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from minisgl.server.answer_models import AnswerModel, AnthropicError


class TextBlock(AnswerModel):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(AnswerModel):
    """Reasoning, as it is."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Always empty: this server takes thinking back without one."""


class ToolUseBlock(AnswerModel):
    """A tool that the model wants to be used."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageTokensDetails(AnswerModel):
    """What the generated tokens were."""

    thinking_tokens: int
    """Of thinking; counted in whole increments."""


class MessageUsage(AnswerModel):
    """Token counts; those of the input are the sum of three."""

    input_tokens: int
    """Computed for this request."""
    cache_creation_input_tokens: int
    """Always 0: what is computed is kept in any case."""
    cache_read_input_tokens: int
    """Supplied by the prefix cache."""
    output_tokens: int
    output_tokens_details: MessageTokensDetails


class Message(AnswerModel):
    """A message of the assistant, whole or at its beginning."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    """``null`` at the beginning of a stream."""
    stop_sequence: str | None
    """The one that was found, if ``stop_reason`` says so."""
    usage: MessageUsage


class MessageStart(AnswerModel):
    """The message begins: without content, and with the counts of its input."""

    type: Literal["message_start"]
    message: Message


class Ping(AnswerModel):
    """Nothing has happened."""

    type: Literal["ping"]


class BlockStart(AnswerModel):
    """A block begins, empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(AnswerModel):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(AnswerModel):
    """More thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(AnswerModel):
    """The end of thinking."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(AnswerModel):
    """More of the JSON text of a tool's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(AnswerModel):
    """More of the open block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        TextDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")
    ]


class BlockStop(AnswerModel):
    """The open block is complete."""

    type: Literal["content_block_stop"]
    index: int


class EndOfMessage(AnswerModel):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(AnswerModel):
    """The end of the message, with all counts."""

    type: Literal["message_delta"]
    delta: EndOfMessage
    usage: MessageUsage


class MessageStop(AnswerModel):
    """The last event."""

    type: Literal["message_stop"]


class MessageStreamEvent(
    RootModel[
        Annotated[
            MessageStart
            | Ping
            | BlockStart
            | BlockDelta
            | BlockStop
            | MessageDelta
            | MessageStop
            | AnthropicError,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a message's stream; its name is its ``type``."""


class TokenCount(AnswerModel):
    """The tokens of a prompt."""

    input_tokens: int
