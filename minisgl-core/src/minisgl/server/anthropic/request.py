"""``POST /v1/messages``: its fields, and the chat that they mean."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from minisgl.errors import RequestError
from minisgl.request import MAX_CACHE_SALT, MAX_PRIORITY, MAX_STOP_STRINGS, MAX_WHOLE
from minisgl.server.anthropic.messages import chat_messages
from minisgl.server.chat.convert import chat_request
from minisgl.server.errors import in_words_of
from minisgl.server.fields import Nested, NotOffered, RequestModel, Timeout
from minisgl.server.openai.chat_request import ChatRequest
from minisgl.server.openai.fields import documented

CLIENT_NAMES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}


class Tool(Nested):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    """Only tools that the client runs; this server runs none."""
    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Of the function."""
    description: str | None = None
    """What it does, for the model."""
    input_schema: dict[str, Any]
    """JSON Schema of its arguments."""
    strict: bool | None = None
    """Without effect: a call that is required is always held to its schema, and no other one is."""
    cache_control: dict[str, Any] | None = None
    """Without effect: every prefix is looked up."""
    eager_input_streaming: bool | None = None
    """Without effect: the input of a call is always streamed as it comes."""
    input_examples: list[dict[str, Any]] | None = None
    """Without effect: no chat template shows examples."""
    defer_loading: Annotated[
        Any, NotOffered("every tool is shown to the model from the beginning", (False,))
    ] = None
    allowed_callers: Annotated[
        Any, NotOffered("this server runs no tools that could call others", (["direct"], []))
    ] = None

    def as_openai(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(Nested):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the one to call, with ``tool``."""
    disable_parallel_tool_use: bool = False
    """At most one call."""

    def as_openai(self, tools: Sequence[Tool]) -> str | dict[str, Any]:
        """Return the choice in OpenAI's form.

        Args:
            tools: of the request.

        Raises:
            RequestError: a name is missing, or there are no tools.
        """
        if self.type == "any" and not tools:
            raise RequestError(
                "tool_choice.type is 'any', but the request has no tools", param="tool_choice.type"
            )
        if self.type == "tool":
            if self.name is None:
                raise RequestError(
                    "tool_choice.name is required with the type 'tool'", param="tool_choice.name"
                )
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Nested):
    """Whether the model thinks before it answers, where its template can tell it so."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """All but ``disabled`` mean that it does."""
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Without effect: thinking counts as output, and ``max_tokens`` bounds both."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    """``omitted`` leaves thinking out of the answer; else it is shown as it is."""
    block_binding: dict[str, Any] | None = None
    """Without effect: thinking is read as it comes back, whoever wrote it."""


class OutputFormat(Nested):
    """``output_config.format``."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON Schema that the text must satisfy."""


class OutputConfig(Nested):
    """What the answer shall be like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Given to the chat template as ``reasoning_effort``."""
    format: OutputFormat | None = None
    """What the text must look like."""
    task_budget: Annotated[Any, NotOffered("this server counts no tokens over requests")] = None

    def response_format(self) -> dict[str, Any] | None:
        """Return the format as ``/v1/chat/completions`` takes it."""
        if self.format is None:
            return None
        return {"type": "json_schema", "json_schema": {"schema": self.format.json_schema}}


class PromptFields(RequestModel):
    """What both routes take: everything that becomes the prompt."""

    model: str | None = None
    """Name of the model; by default, the one that is served."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """The conversation: ``role`` (``user``, ``assistant``) and ``content``, text or blocks of text,
    tool use, tool results and thinking. An assistant's message at the end is gone on with."""
    system: str | list[dict[str, Any]] | None = None
    """Instructions: text, or text blocks."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Which of them; by default, what the model thinks best."""
    thinking: Thinking | None = None
    """Given to the chat template as ``enable_thinking`` and ``thinking``."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables of the chat template; not in Anthropic's API."""
    output_config: OutputConfig | None = None
    """How much effort the answer is worth, and what its text must look like."""
    cache_control: dict[str, Any] | None = None
    """Without effect: every prefix is looked up; ``cache_salt`` keeps clients apart."""
    user_profile_id: str | None = None
    """A label for the client's own accounting; without effect."""
    workspace_id: str | None = None
    """Without effect: this server has no workspaces."""

    not_offered: ClassVar[Mapping[str, NotOffered]] = {
        "mcp_servers": NotOffered("this server runs no tools", ([],)),
        "container": NotOffered("this server runs no tools"),
        "context_management": NotOffered("send the messages that shall be read"),
        "output_format": NotOffered("use output_config.format"),
        "diagnostics": NotOffered(
            "this server keeps no request to compare with", ({}, {"previous_message_id": None})
        ),
        "inference_geo": NotOffered("this server does not know where it stands", ("global",)),
        "speed": NotOffered("this server has one speed", ("standard",)),
        "billing_policy": NotOffered("this server bills nobody"),
        "compaction": NotOffered("send the messages that shall be read"),
        "fallback_credit_token": NotOffered("this server bills nobody"),
        "fallbacks": NotOffered("this server has one model", ([],)),
        "thread": NotOffered("this server keeps nothing; send all messages"),
    }

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields of the chat request that make its prompt.

        Raises:
            RequestError: a message or a tool cannot be read.
        """
        messages = chat_messages(self.system, self.messages)
        goes_on = messages[-1]["role"] == "assistant"
        kwargs: dict[str, Any] = {}
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            kwargs = {"enable_thinking": thinks, "thinking": thinks}
        choice, output = self.tool_choice, self.output_config
        hides = self.thinking is not None and self.thinking.display == "omitted"
        return {
            "messages": messages,
            "tools": None if self.tools is None else [tool.as_openai() for tool in self.tools],
            "tool_choice": None if choice is None else choice.as_openai(self.tools or ()),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "chat_template_kwargs": kwargs | (self.chat_template_kwargs or {}),
            "continue_final_message": goes_on,
            "reasoning_effort": output and output.effort,
            "response_format": output and output.response_format(),
            "include_reasoning": not hides,
        }


class MessagesRequest(PromptFields):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, documented(minimum=1, maximum=MAX_WHOLE)]
    """Most tokens to generate."""
    stop_sequences: Annotated[list[str] | None, documented(maxItems=MAX_STOP_STRINGS)] = None
    """Strings that end the text; they are not returned."""
    stream: bool = False
    """Send the answer as server-sent events while it comes."""
    temperature: Annotated[float, documented(minimum=0, maximum=100)] = 1.0
    """0 takes the likeliest token; above, logits are divided by it before a token is drawn."""
    top_p: Annotated[float | None, documented(exclusiveMinimum=0, maximum=1)] = None
    """Draw from the smallest set of tokens whose probability reaches this."""
    top_k: Annotated[int | None, documented(minimum=-1, maximum=MAX_WHOLE)] = None
    """Draw among this many of the likeliest tokens only; -1 and 0 mean all."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """A higher number is served earlier; not in Anthropic's API."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """Only requests with the same one share cached prefixes; not in Anthropic's API."""
    timeout: Timeout | None = None
    """Seconds that the answer may take in all; then it ends with 504; not in Anthropic's API."""
    metadata: dict[str, Any] | None = None
    """Labels for the client's own accounting; without effect."""
    service_tier: str | None = None
    """Without effect: this server has one tier."""

    def chat(self) -> ChatRequest:
        """Return the chat that is meant.

        Raises:
            RequestError: a field is wrong; ``param`` is its name here.
        """
        with in_words_of(CLIENT_NAMES):
            chat = chat_request(
                {
                    **self.prompt_fields(),
                    "max_tokens": self.max_tokens,
                    "stop": self.stop_sequences,
                    "stream": self.stream,
                    "temperature": self.temperature,
                    "top_p": self.top_p,
                    "top_k": self.top_k,
                    "priority": self.priority,
                    "cache_salt": self.cache_salt,
                    "timeout": self.timeout,
                }
            )
            chat.sampling_params()  # here its errors still get the client's names
            return chat


class CountTokensRequest(PromptFields):
    """``POST /v1/messages/count_tokens``."""

    def chat(self) -> ChatRequest:
        """Return the chat that is meant.

        Raises:
            RequestError: a field is wrong.
        """
        return chat_request(self.prompt_fields())
