"""``POST /v1/completions``: its fields, and what they ask of the engine."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, field_validator

from minisgl.errors import RequestError
from minisgl.request import MAX_LOGPROBS, MAX_WHOLE, SamplingParams
from minisgl.server.client import Prompt
from minisgl.server.fields import NotOffered, shortened
from minisgl.server.openai.fields import (
    MAX_CHOICES,
    MAX_SEQUENCES,
    NOT_OFFERED,
    GenerationFields,
    documented,
)

MAX_PROMPTS: Final = 1024
DEFAULT_MAX_TOKENS: Final = 16
"""``max_tokens`` when absent, as OpenAI documents."""


_CHAT_ONLY: Final = "it belongs to /v1/chat/completions"

COMPLETION_NOT_OFFERED: Final[Mapping[str, NotOffered]] = {
    **NOT_OFFERED,
    "suffix": NotOffered(
        "text between two pieces needs a prompt in the model's own form, which no checkpoint "
        "declares; write that prompt yourself",
        ("",),
    ),
    "max_completion_tokens": NotOffered(_CHAT_ONLY),
    "top_logprobs": NotOffered(f"{_CHAT_ONLY}; logprobs is the number here", (0,)),
    "chat_template_kwargs": NotOffered(_CHAT_ONLY, ({},)),
    "add_generation_prompt": NotOffered(_CHAT_ONLY, (True,)),
    "continue_final_message": NotOffered(_CHAT_ONLY, (False,)),
    "tools": NotOffered(_CHAT_ONLY, ([],)),
    "tool_choice": NotOffered(_CHAT_ONLY, ("none", "auto")),
    "parallel_tool_calls": NotOffered(_CHAT_ONLY, (True, False)),
    "functions": NotOffered(_CHAT_ONLY, ([],)),
    "function_call": NotOffered(_CHAT_ONLY, ("none", "auto")),
    "reasoning_effort": NotOffered(_CHAT_ONLY, ("none",)),
    "modalities": NotOffered("answers are text", (["text"],)),
    "audio": NotOffered("answers are text"),
    "store": NotOffered("this server keeps nothing", (False,)),
}


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``."""

    not_offered: ClassVar[Mapping[str, NotOffered]] = COMPLETION_NOT_OFFERED

    prompt: Annotated[
        Any,
        Field(
            json_schema_extra={
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                    {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "array", "minItems": 1, "items": {"type": "integer"}},
                    },
                ]
            }
        ),
    ]
    """Text, token ids, or a list of either."""
    max_tokens: Annotated[int | None, documented(minimum=0, maximum=MAX_WHOLE)] = None
    """Most tokens to generate, 16 by default; 0 only with ``echo``."""
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    """Accepted up to ``n``: this server returns every answer that it generates."""
    echo: bool = False
    """Return the prompt before the answer."""
    logprobs: Annotated[int | None, documented(minimum=0, maximum=MAX_LOGPROBS)] = None
    """Return the log-probability of each token, and of this many alternatives, by the model itself:
    before penalties, bias, temperature and filters."""
    add_special_tokens: bool = True
    """Let the tokenizer add the special tokens that it is configured to add, such as BOS."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, value: object) -> object:
        """Take ``false``, which the chat endpoint has, as no log-probabilities."""
        return None if value is False else value

    @property
    def only_echo(self) -> bool:
        """Whether nothing is generated."""
        return self.max_tokens == 0

    @property
    def wants_prompt(self) -> bool:
        """Whether the answer needs the prompt's tokens."""
        return self.echo or super().wants_prompt

    def check_together(self) -> None:
        """Refuse fields that contradict one another."""
        super().check_together()
        if self.best_of is not None and self.best_of > self.n:
            raise RequestError(
                f"best_of must be from 1 to n ({self.n}), got {self.best_of}: this server returns "
                "every answer that it generates",
                param="best_of",
            )
        if self.only_echo and not self.echo:
            raise RequestError(
                f"max_tokens must be at least 1 and at most {MAX_WHOLE}, got 0; "
                "0 is only allowed with echo",
                param="max_tokens",
            )

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of each answer.

        Raises:
            RequestError: one is outside its range.
        """
        changes: dict[str, Any] = {"logprobs": self.logprobs}
        if self.max_tokens is None:
            changes["max_tokens"] = max(DEFAULT_MAX_TOKENS, min(self.min_tokens, MAX_WHOLE))
        elif self.only_echo:  # the engine always computes one token; the answer leaves it out
            changes |= {"max_tokens": 1, "logprobs": None}
        if self.echo and self.logprobs is not None:
            changes["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.params(**changes)

    def prompts(self) -> list[Prompt]:
        """Return the prompts: one, or each of a batch.

        Raises:
            RequestError: ``prompt`` is none of text, token ids, or a list of either.
        """
        prompts = self._prompts()
        if len(prompts) > MAX_PROMPTS:
            raise RequestError(
                f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompts)}",
                param="prompt",
            )
        if len(prompts) * self.n > MAX_SEQUENCES:
            raise RequestError(
                f"n times the number of prompts may be at most {MAX_SEQUENCES}, "
                f"got {self.n} times {len(prompts)}",
                param="n",
            )
        return prompts

    def _prompts(self) -> list[Prompt]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(part, str) for part in prompt) or all(map(_is_ids, prompt)):
                return prompt
            if _is_ids(prompt):
                return [prompt]
        raise RequestError(
            "prompt must be text, a non-empty list of token ids, or a non-empty list of either, "
            f"got {shortened(prompt)}",
            param="prompt",
        )


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(part) is int for part in value)
