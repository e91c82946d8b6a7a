"""Messages that the API server receives."""

import msgspec


class TextReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next piece of one request's text; the one with a ``finish_reason`` is its last.

    Attributes:
        text: the increment; the concatenation of all increments is the whole text.
        token_ids: the tokens that this reply commits.
        finish_reason: ``stop``, ``length``, ``abort``; ``None`` while the request runs.
        num_prompt_tokens, num_completion_tokens, num_cached_tokens: totals, set in the last reply.
    """

    uid: int
    text: str
    token_ids: list[int] = []
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0


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
    """

    sequence: int
    num_steps: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int


FrontendMessage = ReplyBatch | ErrorReply | Pong
