"""Messages that the API server receives."""

import msgspec


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token that could have stood at a place.

    Attributes:
        token_id: its id.
        text: as the tokenizer decodes it alone, with U+FFFD for cut characters.
        data: its exact bytes; empty if it has none.
        logprob: natural logarithm of its probability by the model, before penalties and
            temperature; finite.
        rank: 1 for the likeliest token of the vocabulary.
    """

    token_id: int
    text: str
    data: bytes
    logprob: float
    rank: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The token that stands at a place, and the likeliest ones there, best first."""

    chosen: TopLogprob
    top: list[TopLogprob] = []


class PromptEcho(msgspec.Struct, frozen=True):
    """The prompt of a request that asked for it.

    Attributes:
        token_ids: of the prompt.
        text: what they decode to, special tokens included.
        logprobs: one a token, if they were asked for; the first token has none.
        first_text, first_data: the first token's own text and exact bytes, beside ``logprobs``.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob | None] = []
    first_text: str = ""
    first_data: bytes = b""


class TextReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next piece of one request's text; the one with a ``finish_reason`` is its last.

    Attributes:
        text: the increment; the concatenation of all increments is the whole text.
        token_ids: the tokens that this reply commits.
        finish_reason: ``stop``, ``length``, ``abort``; ``None`` while the request runs.
        num_prompt_tokens, num_cached_tokens: of the prompt, and how many the prefix cache supplied.
        num_completion_tokens: the total, set in the last reply.
        logprobs: one a token of ``token_ids``, if the request asked for them.
        prompt: in the first reply, if the request asked for it (``return_prompt``,
            ``prompt_logprobs``).
        prompt_tail: in the first reply, if the request asked for it (``return_prompt_tail``): the
            end of the rendered chat, behind the last text that the client wrote.
        stop_string: in the last reply, if one has ended the text: which.
    """

    uid: int
    text: str
    token_ids: list[int] = []
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprob] = []
    prompt: PromptEcho | None = None
    prompt_tail: str = ""
    stop_string: str | None = None


class TokensReply(msgspec.Struct, frozen=True, tag="tokens_reply"):
    """The answer to a ``TokenizeOnly`` (ids) or a ``DetokenizeOnly`` (text)."""

    uid: int
    token_ids: list[int] = []
    text: str = ""


class ReplyBatch(msgspec.Struct, frozen=True, tag="replies"):
    """Increments of many requests."""

    replies: list[TextReply]


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """A request is refused or failed: its only terminal event."""

    uid: int
    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The scheduler's heartbeat.

    Attributes:
        sequence: of the ``Ping`` that this answers.
        num_steps: steps finished since the start.
        num_running, num_waiting: requests being served and queued.
        num_free_pages, num_pages: of the KV pool (free counts pages that can be evicted too).
        num_retracted: retractions since the start.
        num_queried_tokens: prompt tokens of all requests that were admitted since the start.
        num_cached_tokens: how many of them the prefix cache supplied.
    """

    sequence: int
    num_steps: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_retracted: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0


FrontendMessage = ReplyBatch | ErrorReply | Pong | TokensReply
