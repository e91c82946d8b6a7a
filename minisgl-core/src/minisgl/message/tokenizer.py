"""Messages that tokenizer and detokenizer workers receive."""

from typing import Any

import msgspec

from minisgl.message.backend import Shutdown
from minisgl.message.codec import Count, Uid
from minisgl.request import SamplingParams


class TokenizeRequest(msgspec.Struct, frozen=True, tag="tokenize"):
    """Turn one prompt into tokens and hand it to the scheduler.

    Attributes:
        prompt: text, a list of token ids, or a list of chat messages (``{"role", "content"}``
            dicts); msgpack knows one kind of list, so the tokenizer worker checks which it is.
        add_special_tokens: for text prompts: let the tokenizer add BOS as it is configured to.
        template_kwargs: extra variables of the chat template.
        add_generation_prompt: end the rendered chat with the header of the assistant's turn.
        continue_final_message: leave the last message open, so that the answer goes on with it.
        tools: functions that the template may show to the model, in OpenAI's form.
        return_prompt_tail: the first ``TextReply`` carries the prompt's end (``prompt_tail``).
    """

    uid: Uid
    prompt: str | list[Any]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] = []
    return_prompt_tail: bool = False


class TokenizeOnly(msgspec.Struct, frozen=True, tag="tokenize_only"):
    """Turn one prompt into tokens and return them to the API server (``TokensReply``).

    The fields are those of ``TokenizeRequest``.
    """

    uid: Uid
    prompt: str | list[Any]
    add_special_tokens: bool = True
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] = []


class DetokenizeOnly(msgspec.Struct, frozen=True, tag="detokenize_only"):
    """Turn token ids into text and return it to the API server (``TokensReply``)."""

    uid: Uid
    token_ids: list[int]
    skip_special_tokens: bool = False


class ForgetRequests(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody waits for these any more: what has not been begun shall not be."""

    uids: list[Uid]


class StreamStart(msgspec.Struct, frozen=True):
    """What the detokenizer needs to know about a request, before its first token."""

    uid: Uid
    num_prompt_tokens: Count
    params: SamplingParams
    num_cached_tokens: Count = 0
    prompt_token_ids: bytes = b""
    """Little-endian int32, where the request wants its prompt back."""
    prompt_tail: str = ""
    """Of a chat prompt, behind the last text that the client wrote, if the request wants it."""


class LogprobBatch(msgspec.Struct, frozen=True):
    """Log-probabilities of some tokens of a step, as flat little-endian arrays.

    Attributes:
        places: int32 ``[n]``: which tokens of the batch, ascending.
        num_top: int32 ``[n]``: alternatives of each.
        chosen: float32 ``[n]``: of the tokens themselves.
        ranks: int32 ``[n]``: of the tokens themselves, 1 for the likeliest.
        top_ids, top_values: int32 and float32 ``[sum(num_top)]``, best first.
    """

    places: bytes
    num_top: bytes
    chosen: bytes
    ranks: bytes
    top_ids: bytes
    top_values: bytes


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a prompt's tokens but the first, complete before its first new token.

    ``logprobs.places`` counts from the prompt's second token.
    """

    uid: Uid
    logprobs: LogprobBatch


class Failure(msgspec.Struct, frozen=True):
    """Why the scheduler refused or ended a request with the reason ``error``."""

    message: str
    status: int = 500
    param: str | None = None
    code: str | None = None


class TokenBatch(msgspec.Struct, frozen=True, tag="tokens"):
    """One step's new tokens of many requests, as flat arrays of equal order.

    Attributes:
        started: requests that appear for the first time in this batch.
        uids: little-endian int64 bytes, one a token.
        token_ids: little-endian int32 bytes, one a token.
        finished_uids: requests that end with this batch, after their tokens above.
        finish_reasons: one a finished request.
        num_cached_tokens: one a finished request: prompt tokens that the prefix cache supplied.
        failures: one a finished request: what went wrong if the reason is ``error``, else ``None``.
        logprobs: of those tokens whose requests want them.
        prompt_logprobs: of prompts that are complete, before their first token.
    """

    started: list[StreamStart]
    uids: bytes
    token_ids: bytes
    finished_uids: list[Uid]
    finish_reasons: list[str]
    num_cached_tokens: list[Count]
    failures: list[Failure | None]
    logprobs: LogprobBatch | None = None
    prompt_logprobs: list[PromptLogprobs] = []


TokenizerMessage = TokenizeRequest | TokenizeOnly | DetokenizeOnly | ForgetRequests | Shutdown
DetokenizerMessage = TokenBatch | Shutdown
