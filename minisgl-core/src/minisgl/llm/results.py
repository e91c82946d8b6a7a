"""What goes into and comes out of ``LLM``."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl.errors import EngineLostError, RequestError
from minisgl.message import ErrorReply, PromptEcho, TextReply, TokenLogprob, TopLogprob
from minisgl.request import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages (``{"role": ..., "content": ...}``)."""

ENGINE_LOST: Final = "engine_lost"
"""The code of the reply to those who wait when an ``EngineLostError`` ends everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token at a place, and how likely it was there.

    Attributes:
        token_id: its id.
        text: as it reads alone, with U+FFFD for a part of a character.
        data: the bytes that it adds to the text: empty for tokens that the text leaves out.
        logprob: natural logarithm of its probability by the model, before penalties, biases, masks,
            temperature and filters; at least -9999, so always finite.
        rank: 1 for the likeliest token of the vocabulary; equals share a rank.
    """

    token_id: int
    text: str
    data: bytes
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The token that stands at a place, and the likeliest ones there.

    Attributes:
        token: the one that stands there.
        top: as many as were asked for, best first; it need not be among them.
    """

    token: Logprob
    top: list[Logprob]


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
        logprobs: one for each of ``token_ids``; ``None`` if they were not asked for.
        prompt_logprobs: one for each token of the prompt, ``None`` for the first, which nothing
            predicts; ``None`` if they were not asked for.
        prompt, prompt_token_ids: the prompt's text, special tokens included, and its tokens;
            ``None`` if neither it (``return_prompt``) nor its log-probabilities were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    time_to_first_token: float | None = None
    total_time: float = 0.0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None


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
        logprobs: one for each of ``token_ids``; ``None`` if they were not asked for.
        prompt_logprobs, prompt, prompt_token_ids: in the first chunk, as in ``GenerationResult``.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(slots=True)
class Collected:
    """The replies to one request so far; times are seconds of a monotonic clock."""

    params: SamplingParams
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: PromptEcho | None = None
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
        self.logprobs.extend(map(_to_logprobs, reply.logprobs))
        self.prompt = self.prompt or reply.prompt
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
            logprobs=None if self.params.logprobs is None else self.logprobs,
            **_of_prompt(self.prompt, self.params),
        )


def to_error(reply: ErrorReply) -> RequestError | EngineLostError:
    """Return the exception that an error reply stands for."""
    if reply.code == ENGINE_LOST:
        return EngineLostError(reply.message)
    return RequestError(reply.message, param=reply.param, status=reply.status, code=reply.code)


def to_chunk(reply: TextReply, params: SamplingParams) -> GenerationChunk:
    """Return a reply to a request with ``params`` as users see it."""
    wanted = params.logprobs is not None
    return GenerationChunk(
        text=reply.text,
        token_ids=list(reply.token_ids),
        finish_reason=reply.finish_reason,
        num_prompt_tokens=reply.num_prompt_tokens,
        num_cached_tokens=reply.num_cached_tokens,
        logprobs=list(map(_to_logprobs, reply.logprobs)) if wanted else None,
        **_of_prompt(reply.prompt, params),
    )


def _of_prompt(prompt: PromptEcho | None, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a result or chunk that tell about the prompt."""
    if prompt is None:
        return {}
    logprobs: list[TokenLogprobs | None] | None = None
    if params.prompt_logprobs is not None:
        logprobs = [None if one is None else _to_logprobs(one) for one in prompt.logprobs]
    return {
        "prompt": prompt.text,
        "prompt_token_ids": list(prompt.token_ids),
        "prompt_logprobs": logprobs,
    }


def _to_logprobs(one: TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs(token=_to_logprob(one.chosen), top=list(map(_to_logprob, one.top)))


def _to_logprob(one: TopLogprob) -> Logprob:
    return Logprob(
        token_id=one.token_id, text=one.text, data=one.data, logprob=one.logprob, rank=one.rank
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
