"""What is known about each request, and about the client itself. Crosses processes as msgpack."""

from enum import StrEnum

import msgspec


class Counted(StrEnum):
    """Where the number of a request's output tokens comes from."""

    USAGE = "usage"
    """From the server's ``usage``."""
    TOKEN_IDS = "token_ids"  # noqa: S105
    """From the ids that the server listed in its chunks."""
    CHUNKS = "chunks"
    """From the number of chunks: too few, if a chunk holds several tokens."""


class RequestRecord(msgspec.Struct):
    """One request; all times in seconds.

    Attributes:
        number: its place in the data set.
        due: when it should have been sent, after the start of the run.
        sent: when it was, after it had waited for a place (``--max-concurrency``).
        first_token: when its first token was there, after the start; ``None`` if none came.
        ended: when its last chunk was there, or when it failed.
        intervals: between one token and the next, as far as chunks tell them apart.
        num_chunks: chunks that held tokens.
        input_tokens, cached_tokens: as the server reports them; ``None`` if it does not.
        output_tokens: as ``counted`` says.
        finish_reason: as the server reports it.
        status: of HTTP; 0 if there was no response.
        error: why it failed; ``None`` if it is complete.
    """

    number: int
    due: float
    sent: float
    first_token: float | None = None
    ended: float = 0.0
    intervals: list[float] = []
    num_chunks: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted: Counted = Counted.CHUNKS
    finish_reason: str | None = None
    status: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending the request."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2e(self) -> float:
        """End-to-end latency: from sending the request to its last chunk."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; ``None`` for an answer of one token."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.ended - self.first_token) / (self.output_tokens - 1)


class ClientHealth(msgspec.Struct):
    """How busy one client process was: a busy one measures itself.

    Attributes:
        cpu_s, wall_s: CPU time of the process and the time that passed.
        loop_lag: seconds by which the event loop woke up late, sampled every 10 ms.
    """

    cpu_s: float
    wall_s: float
    loop_lag: list[float] = []

    @property
    def cpu_fraction(self) -> float:
        """Share of one core that it took."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


class LoadResult(msgspec.Struct):
    """A run, or one process's part of it."""

    records: list[RequestRecord]
    health: list[ClientHealth]
