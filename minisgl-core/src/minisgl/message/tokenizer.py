"""Messages that tokenizer and detokenizer workers receive."""

from typing import Any

import msgspec

from minisgl.message.backend import Shutdown
from minisgl.request import SamplingParams


class TokenizeRequest(msgspec.Struct, frozen=True, tag="tokenize"):
    """Turn one prompt into tokens and hand it to the scheduler.

    Attributes:
        prompt: text, a list of token ids, or a list of chat messages (``{"role", "content"}``
            dicts); msgpack knows one kind of list, so the tokenizer worker checks which it is.
        add_special_tokens: for text prompts: let the tokenizer add BOS as it is configured to.
        template_kwargs: extra variables of the chat template.
        add_generation_prompt: end the rendered chat with the header of the assistant's turn.
    """

    uid: int
    prompt: str | list[Any]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True


class StreamStart(msgspec.Struct, frozen=True):
    """What the detokenizer needs to know about a request, before its first token."""

    uid: int
    num_prompt_tokens: int
    params: SamplingParams
    num_cached_tokens: int = 0


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
    """

    started: list[StreamStart]
    uids: bytes
    token_ids: bytes
    finished_uids: list[int]
    finish_reasons: list[str]
    num_cached_tokens: list[int]
    failures: list[Failure | None]


TokenizerMessage = TokenizeRequest | Shutdown
DetokenizerMessage = TokenBatch | Shutdown
