"""``POST /v1/responses``: its fields, and the chat that they mean."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from minisgl.errors import RequestError
from minisgl.request import (
    MAX_CACHE_SALT,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_WHOLE,
    MIN_SEED,
)
from minisgl.server.chat.convert import chat_request
from minisgl.server.errors import in_words_of
from minisgl.server.fields import Nested, NotOffered, RequestModel, Timeout, shortened
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.fields import ReasoningEffort, documented
from minisgl.server.responses.items import chat_messages

CLIENT_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools[].function": "tools[]",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "tool_choice.allowed_tools.tools[].function": "tool_choice.tools[]",
}
LOGPROBS: Final = "message.output_text.logprobs"


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""All that OpenAI knows: what no answer of this server holds has nothing to include."""


class FunctionTool(Nested):
    """A function that the model may call."""

    type: Literal["function"]
    """Only tools that the client runs; this server runs none."""
    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Of the function."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments."""
    strict: bool | None = None
    """Kept for the answer; a call that is required is always held to its schema."""
    output_schema: dict[str, Any] | None = None
    """Kept for the answer; no chat template shows it."""
    defer_loading: Annotated[
        Any, NotOffered("every tool is shown to the model from the beginning", (False,))
    ] = None
    allowed_callers: Annotated[
        Any, NotOffered("this server runs no tools that could call others", (["direct"], []))
    ] = None
    is_async: Annotated[
        Any,
        NotOffered("an answer waits for no tool", (False,)),
        Field(alias="async"),
    ] = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool as ``/v1/chat/completions`` takes it."""
        named = {"name", "description", "parameters", "strict"}
        fields = self.model_dump(include=named, exclude_none=True)
        return {"type": self.type, "function": fields}

    def as_sent(self) -> dict[str, Any]:
        """Return the tool as the answer repeats it."""
        asked = {"name", "description", "parameters", "strict", "type"}
        more = {} if self.output_schema is None else {"output_schema": self.output_schema}
        return {**self.model_dump(include=asked), **more}


class JsonSchemaText(Nested):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    name: str = ""
    """A label; without effect."""
    description: str | None = None
    """For the reader; without effect."""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON Schema."""
    strict: bool | None = None
    """Without effect: a schema is always enforced."""


class PlainText(Nested):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class TextOptions(Nested):
    """``text``."""

    format: Annotated[PlainText | JsonSchemaText, Field(discriminator="type")] | None = None
    """What the text must look like."""
    verbosity: Literal["medium"] | None = None
    """No model here is told how much to say."""

    def response_format(self) -> dict[str, Any] | None:
        """Return the format as ``/v1/chat/completions`` takes it."""
        match self.format:
            case None:
                return None
            case PlainText():
                return {"type": self.format.type}
            case JsonSchemaText():
                schema = {"name": self.format.name, "schema": self.format.json_schema}
                return {"type": "json_schema", "json_schema": schema}


class ReasoningOptions(Nested):
    """``reasoning``."""

    effort: ReasoningEffort | None = None
    """As ``reasoning_effort`` of ``/v1/chat/completions``."""
    context: Annotated[
        Any, NotOffered("the chat template decides which reasoning it shows", ("auto",))
    ] = None
    mode: Annotated[Any, NotOffered("there is one mode", ("standard",))] = None
    summary: str | None = None
    """Without effect: reasoning is always shown as it is."""
    generate_summary: str | None = None
    """The older name of ``summary``; without effect."""


class ResponsesStreamOptions(Nested):
    """``stream_options``."""

    include_obfuscation: Literal[False] = False
    """Padding against eavesdroppers who measure chunks; not offered."""


class ResponsesRequest(RequestModel):
    """``POST /v1/responses``."""

    not_offered: ClassVar[Mapping[str, NotOffered]] = {
        "previous_response_id": NotOffered("this server keeps nothing; send the whole input"),
        "conversation": NotOffered("this server keeps nothing; send the whole input"),
        "background": NotOffered("this server keeps nothing", (False,)),
        "prompt": NotOffered("this server has no stored prompts"),
        "max_tool_calls": NotOffered("it counts tools that the server runs, and it runs none"),
        "truncation": NotOffered("send the input as it shall be read", ("disabled",)),
        "context_management": NotOffered("send the input as it shall be read", ([],)),
        "n": NotOffered("a response is one answer", (1,)),
        "background_options": NotOffered("this server keeps nothing"),
        "access_programs": NotOffered("this server has none"),
        "image": NotOffered("answers are text"),
        "moderation": NotOffered("this server judges no content"),
    }

    input: Annotated[str | list[dict[str, Any]], Field(min_length=1)]
    """Text, or items: messages, function calls and their outputs, reasoning."""
    model: str | None = None
    """Name of the model; by default, the one that is served."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int | None, documented(minimum=1, maximum=MAX_WHOLE)] = None
    """Most tokens to generate; by default, all the room that is left."""
    temperature: Annotated[float, documented(minimum=0, maximum=100)] = 1.0
    """0 takes the likeliest token; above, logits are divided by it before a token is drawn."""
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] = 1.0
    """Draw from the smallest set of tokens whose probability reaches this."""
    tools: list[FunctionTool] | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """``auto``, ``none``, ``required``, ``{"type": "function", "name": ...}``, or
    ``{"type": "allowed_tools", "mode": ..., "tools": [...]}``."""
    parallel_tool_calls: bool = True
    """Whether an answer may hold several calls."""
    text: TextOptions | None = None
    """What the text must look like."""
    reasoning: ReasoningOptions | None = None
    """How much the model thinks, where its template can tell it so."""
    include: list[Includable] | None = None
    """Log-probabilities of the text. Encrypted reasoning is left out: reasoning is always plain;
    and what else there is belongs to pictures, and to tools that this server does not run."""
    top_logprobs: Annotated[int, documented(minimum=0, maximum=MAX_LOGPROBS)] = 0
    """Alternatives of each token; needs ``include``."""
    stream: bool = False
    """Send the answer as server-sent events while it comes."""
    stream_options: ResponsesStreamOptions | None = None
    """Only with ``stream``."""
    store: bool | None = None
    """Without effect: this server keeps nothing, and the answer says ``"store": false``."""
    top_k: Annotated[int, documented(minimum=-1, maximum=MAX_WHOLE)] = -1
    """Draw among this many of the likeliest tokens only; not in OpenAI's API."""
    min_p: Annotated[float, documented(minimum=0, maximum=1)] = 0.0
    """Drop tokens less likely than this fraction of the likeliest one's; not in OpenAI's API."""
    seed: Annotated[int | None, documented(minimum=MIN_SEED, maximum=MAX_SEED)] = None
    """Makes the noise of the answer reproducible; not in OpenAI's API."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """A higher number is served earlier; not in OpenAI's API."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """Only requests with the same one share cached prefixes; not in OpenAI's API."""
    timeout: Timeout | None = None
    """Seconds that the answer may take in all; then it ends with 504; not in OpenAI's API."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables of the chat template; not in OpenAI's API."""
    user: str | None = None
    """A label for the client's own accounting; without effect."""
    metadata: dict[str, Any] | None = None
    """Labels that come back with the answer."""
    service_tier: str | None = None
    """Without effect: this server has one tier."""
    safety_identifier: str | None = None
    """A label; without effect."""
    prompt_cache_key: str | None = None
    """Without effect: every prefix is looked up; ``cache_salt`` keeps clients apart."""
    prompt_cache_options: dict[str, Any] | None = None
    """Without effect: every prefix is looked up, and kept in memory while there is room."""
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """Without effect: it bounds how long a prefix is kept, which here is while there is room."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatRequest:
        """Return the chat that is meant.

        Raises:
            RequestError: a field is wrong; ``param`` is its name here.
        """
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} needs {LOGPROBS!r} in include",
                param="top_logprobs",
            )
        with in_words_of(CLIENT_NAMES):
            chat = chat_request(
                {
                    "messages": chat_messages(self.instructions, self.input),
                    "max_tokens": self.max_output_tokens,
                    "temperature": self.temperature,
                    "top_p": self.top_p,
                    "top_k": self.top_k,
                    "min_p": self.min_p,
                    "seed": self.seed,
                    "tools": None if self.tools is None else [t.as_chat() for t in self.tools],
                    "tool_choice": _chat_choice(self.tool_choice),
                    "parallel_tool_calls": self.parallel_tool_calls,
                    "response_format": self.text and self.text.response_format(),
                    "reasoning_effort": self.reasoning and self.reasoning.effort,
                    "logprobs": self.wants_logprobs,
                    "top_logprobs": self.top_logprobs,
                    "stream": self.stream,
                    "priority": self.priority,
                    "cache_salt": self.cache_salt,
                    "timeout": self.timeout,
                    "chat_template_kwargs": self.chat_template_kwargs,
                }
            )
            chat.check_together()
            chat.sampling_params()  # here its errors still get the client's names
            return chat


def _chat_choice(choice: Any) -> Any:
    """Return ``tool_choice`` as ``/v1/chat/completions`` takes it.

    Raises:
        RequestError: it is about a tool that this server does not know.
    """
    if not isinstance(choice, Mapping):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            return {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": choice.get("mode", "auto"),
                    "tools": _chat_references(choice.get("tools")),
                },
            }
        case kind:
            raise RequestError(
                f"tool_choice.type must be 'function' or 'allowed_tools', got {shortened(kind)}: "
                "this server runs no tools of its own",
                param="tool_choice.type",
            )


def _chat_references(tools: Any) -> Any:
    """Return references to functions in the form of a chat; what is none stays as it is."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": tool.get("type", "function"), "function": {"name": tool.get("name")}}
        if isinstance(tool, Mapping)
        else tool
        for tool in tools
    ]
