"""What goes into and comes out of ``LLM``."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl.errors import EngineLostError, RequestError
from minisgl.message import ErrorReply, TextReply

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages (``{"role": ..., "content": ...}``)."""

ENGINE_LOST: Final = "engine_lost"
"""The code of the reply to those who wait when an ``EngineLostError`` ends everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The answer to one prompt.

    Attributes:
        text: the generated text, without the stop string that ended it; empty without a tokenizer.
        token_ids: the generated tokens, the end-of-sequence token included.
        finish_reason: ``stop``, ``length`` or ``abort``.
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: prompt tokens that the prefix cache supplied.
        time_to_first_token: seconds from the call to the first reply with tokens; ``None`` if
            there was none.
        total_time: seconds from the call to the last reply.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    time_to_first_token: float | None = None
    total_time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationProgress:
    """How far a call of ``LLM.generate`` has come.

    Attributes:
        num_prompts: of the call.
        num_started: prompts that have their first token, those that are complete included.
        num_done: prompts whose answer is complete.
    """

    num_prompts: int
    num_started: int
    num_done: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """The next piece of an answer.

    Attributes:
        text: the increment; all increments together are the whole text.
        token_ids: the tokens that it commits.
        finish_reason: ``None``, but in the last chunk.
        num_prompt_tokens, num_cached_tokens: set in the last chunk.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Collected:
    """The replies to one request so far; times are seconds of a monotonic clock."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: TextReply | None = None
    error: RequestError | EngineLostError | None = None
    began: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    ended: float = 0.0

    @property
    def done(self) -> bool:
        """Whether the terminal event has come."""
        return self.last is not None or self.error is not None

    def add(self, reply: TextReply | ErrorReply) -> None:
        """Take one more reply."""
        if isinstance(reply, ErrorReply):
            self.error = to_error(reply)
            return
        if self.first_token is None and reply.token_ids:
            self.first_token = time.perf_counter()
        self.parts.append(reply.text)
        self.token_ids.extend(reply.token_ids)
        if reply.finish_reason is not None:
            self.last = reply
            self.ended = time.perf_counter()

    def result(self) -> GenerationResult:
        """Return the whole answer.

        Raises:
            RequestError: the request failed.
            EngineLostError: the engine was lost meanwhile.
        """
        if self.error is not None:
            raise self.error
        assert self.last is not None, "asked for after the terminal event"
        return GenerationResult(
            text="".join(self.parts),
            token_ids=self.token_ids,
            finish_reason=str(self.last.finish_reason),
            num_prompt_tokens=self.last.num_prompt_tokens,
            num_cached_tokens=self.last.num_cached_tokens,
            time_to_first_token=None if self.first_token is None else self.first_token - self.began,
            total_time=self.ended - self.began,
        )


def to_error(reply: ErrorReply) -> RequestError | EngineLostError:
    """Return the exception that an error reply stands for."""
    if reply.code == ENGINE_LOST:
        return EngineLostError(reply.message)
    return RequestError(reply.message, param=reply.param, status=reply.status, code=reply.code)


def to_chunk(reply: TextReply) -> GenerationChunk:
    """Return a reply as users see it."""
    return GenerationChunk(
        text=reply.text,
        token_ids=list(reply.token_ids),
        finish_reason=reply.finish_reason,
        num_prompt_tokens=reply.num_prompt_tokens,
        num_cached_tokens=reply.num_cached_tokens,
    )


def to_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list of prompts.

    Text, a list of ids and a list of messages are one prompt each; a list of those is many.

    Raises:
        RequestError: it is none of these.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be text, token ids, chat messages, or a list of those; got {prompts!r}",
            param="prompts",
        )
    if prompts and isinstance(prompts[0], (int, Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
