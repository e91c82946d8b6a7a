"""``POST /v1/chat/completions``: its fields, and what they ask of the engine."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from minisgl.errors import RequestError
from minisgl.parsing.tool_choice import ToolPlan, plan_tools
from minisgl.request import MAX_LOGPROBS, MAX_WHOLE, SamplingParams
from minisgl.server.fields import NotOffered
from minisgl.server.openai.fields import (
    NOT_OFFERED,
    GenerationFields,
    ReasoningEffort,
    documented,
)
from minisgl.server.tokens import generation_prompt, message_texts

CHAT_NOT_OFFERED: Final[Mapping[str, NotOffered]] = {
    **NOT_OFFERED,
    "functions": NotOffered("OpenAI replaced it by tools", ([],)),
    "function_call": NotOffered("OpenAI replaced it by tool_choice", ("none", "auto")),
    "modalities": NotOffered("answers are text", (["text"],)),
    "audio": NotOffered("answers are text"),
    "prediction": NotOffered("this server has no predicted outputs"),
    "verbosity": NotOffered("no model here is told how much to say", ("medium",)),
    "web_search_options": NotOffered("this server searches nothing"),
    "moderation": NotOffered("this server judges no content"),
    "chat_template": NotOffered("a template is a program; the server uses the model's own"),
    "documents": NotOffered("put them into the messages", ([],)),
    "separate_reasoning": NotOffered("reasoning is always apart; see include_reasoning", (True,)),
    "store": NotOffered("this server keeps nothing", (False,)),
    "echo": NotOffered("it belongs to /v1/completions", (False,)),
    "suffix": NotOffered("it belongs to /v1/completions", ("",)),
    "best_of": NotOffered("it belongs to /v1/completions", (1,)),
    "add_special_tokens": NotOffered("the chat template writes them", (False,)),
}


class ChatRequest(GenerationFields):
    """``POST /v1/chat/completions``."""

    not_offered: ClassVar[Mapping[str, NotOffered]] = CHAT_NOT_OFFERED

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """The conversation so far: objects with ``role`` and ``content``, text or text parts."""
    max_completion_tokens: Annotated[int | None, documented(minimum=1, maximum=MAX_WHOLE)] = None
    """OpenAI's newer name of ``max_tokens``, which it wins over. Without either, the answer may
    take all the room that is left."""
    logprobs: bool = False
    """Return the log-probability of each token, by the model itself: before penalties, bias,
    temperature and filters."""
    top_logprobs: Annotated[int, documented(minimum=0, maximum=MAX_LOGPROBS)] = 0
    """Return this many alternatives of each token too; needs ``logprobs``."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables of the chat template, such as ``{"enable_thinking": false}``."""
    add_generation_prompt: bool = True
    """End the prompt with the header of the assistant's turn."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call: objects with ``type`` and ``function``."""
    tool_choice: str | dict[str, Any] | None = None
    """``auto`` (the default with tools), ``none``, ``required``, an object that names a function,
    or one of type ``allowed_tools``."""
    parallel_tool_calls: bool = True
    """Whether an answer may hold several calls."""
    include_reasoning: bool = True
    """Whether the answer shows the model's reasoning, which it has done in any case."""
    continue_final_message: bool = False
    """Leave the last message open: the answer goes on with it."""
    reasoning_effort: ReasoningEffort | None = None
    """Given to the chat template as ``reasoning_effort``; ``none`` also as ``enable_thinking`` and
    ``thinking``, both false. What a template does not read has no effect."""

    def texts(self) -> Iterator[str]:
        """Yield the texts of all messages, as far as they are well-formed."""
        return message_texts(self.messages)

    def check_together(self) -> None:
        """Refuse fields that contradict one another."""
        super().check_together()
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} needs logprobs=true", param="top_logprobs"
            )

    def tool_plan(self) -> ToolPlan:
        """Return what the request wants of tools.

        Raises:
            RequestError: the tools are malformed, or the choice names none of them.
        """
        return plan_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def template_options(self) -> dict[str, Any]:
        """Return the fields of ``TokenizeRequest`` that say how the messages are rendered.

        Raises:
            RequestError: two of them contradict one another.
        """
        kwargs: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            kwargs |= {"enable_thinking": False, "thinking": False}
        return {
            "template_kwargs": kwargs | (self.chat_template_kwargs or {}),
            "add_generation_prompt": generation_prompt(self),
            "continue_final_message": self.continue_final_message,
        }

    def engine_names(self) -> dict[str, str]:
        """Return the client's names of fields, by those of the engine where they differ."""
        names = {**super().engine_names(), "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of each answer.

        Raises:
            RequestError: one is outside its range.
        """
        changes: dict[str, Any] = {"logprobs": self.top_logprobs if self.logprobs else None}
        if self.max_completion_tokens is not None:
            changes["max_tokens"] = self.max_completion_tokens
        return self.params(**changes)
