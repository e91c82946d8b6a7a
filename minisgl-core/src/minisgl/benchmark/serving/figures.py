"""Figures of a run, as vLLM's and SGLang's benchmarks define them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from minisgl.benchmark.serving.records import ClientHealth, Counted, LoadResult, RequestRecord

BUSY_CPU: Final = 0.8
BUSY_LAG_S: Final = 0.01
"""From here on the client is called busy: its share of a core, its lag at the 99th percentile."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a time, milliseconds."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Distribution | None":
        """Return the distribution; ``None`` if there is nothing."""
        if not len(seconds):
            return None
        values = np.asarray(seconds) * 1e3
        median, p90, p95, p99 = (float(np.percentile(values, p)) for p in (50, 90, 95, 99))
        return cls(float(values.mean()), median, p90, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every limit.

    Attributes:
        limits_ms: by the name of the time: ``ttft``, ``tpot``, ``e2e``.
        num_good: requests that met them.
        requests_per_s: of those.
    """

    limits_ms: dict[str, float]
    num_good: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Client:
    """How the client itself did.

    Attributes:
        processes: that sent requests.
        cpu_fraction: of a core, of the busiest one.
        loop_lag_p99_ms: by which the event loop of the worst one woke up late.
        send_lag_p99_ms: by which requests were sent after they were due, waiting for a place
            included.
        busy: why its figures may be its own and not the server's; ``None`` if there is no sign.
    """

    processes: int
    cpu_fraction: float
    loop_lag_p99_ms: float
    send_lag_p99_ms: float
    busy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All figures of a run; times of failed requests do not count.

    Attributes:
        successful, failed: requests.
        failures: how often each reason occurred, most frequent first.
        duration_s: from the first request's sending to the end of the last one.
        requests_per_s: successful ones.
        input_tokens, cached_tokens, output_tokens: of successful requests; ``None`` if the
            server reports none.
        counted: where the output tokens come from, with the number of requests.
        tokens_per_chunk: output tokens a chunk.
        max_concurrency: most requests that ran at once.
        mean_concurrency: on average.
        finish_reasons: of successful requests.
        ttft_ms, tpot_ms, itl_ms, e2e_ms: milliseconds, as benchmarks/README.md defines them.
        goodput: if limits were given.
        client: the client's own state.
    """

    successful: int
    failed: int
    failures: dict[str, int]
    duration_s: float
    requests_per_s: float
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    input_tokens_per_s: float | None
    output_tokens_per_s: float
    counted: dict[str, int]
    tokens_per_chunk: float | None
    max_concurrency: int
    mean_concurrency: float
    finish_reasons: dict[str, int]
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    goodput: Goodput | None
    client: Client

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def summarize(result: LoadResult, limits_ms: Mapping[str, float] | None = None) -> Figures:
    """Return the figures of a run.

    Args:
        result: at least one record.
        limits_ms: for the goodput, by ``ttft``, ``tpot`` or ``e2e``.
    """
    records = result.records
    good = [one for one in records if one.error is None]
    began, ended = min(one.sent for one in records), max(one.ended for one in records)
    duration = max(ended - began, 1e-9)
    inputs = _sum([one.input_tokens for one in good])
    outputs = sum(one.output_tokens for one in good)
    chunks = sum(one.num_chunks for one in good)
    most, mean = concurrency(records)
    return Figures(
        successful=len(good),
        failed=len(records) - len(good),
        failures=dict(Counter(one.error for one in records if one.error).most_common()),
        duration_s=duration,
        requests_per_s=len(good) / duration,
        input_tokens=inputs,
        cached_tokens=_sum([one.cached_tokens for one in good]),
        output_tokens=outputs,
        input_tokens_per_s=None if inputs is None else inputs / duration,
        output_tokens_per_s=outputs / duration,
        counted=dict(Counter(str(one.counted) for one in good)),
        tokens_per_chunk=outputs / chunks if chunks else None,
        max_concurrency=most,
        mean_concurrency=mean,
        finish_reasons=dict(Counter(str(one.finish_reason) for one in good)),
        ttft_ms=Distribution.of([one.ttft for one in good if one.ttft is not None]),
        tpot_ms=Distribution.of([one.tpot for one in good if one.tpot is not None]),
        itl_ms=Distribution.of([value for one in good for value in one.intervals]),
        e2e_ms=Distribution.of([one.e2e for one in good]),
        goodput=None if not limits_ms else _goodput(good, limits_ms, duration),
        client=_client(result.health, records),
    )


def concurrency(records: Sequence[RequestRecord]) -> tuple[int, float]:
    """Return the most requests that ran at once, and their mean over the run."""
    steps = [(one.sent, 1) for one in records] + [(one.ended, -1) for one in records]
    running = most = 0
    for _, change in sorted(steps):
        running += change
        most = max(most, running)
    length = max(time for time, _ in steps) - min(time for time, _ in steps)
    return most, sum(one.e2e for one in records) / length if length else float(most)


def token_count_note(figures: Figures) -> str | None:
    """Return a warning if the server did not tell how many tokens it made."""
    guessed = figures.counted.get(Counted.CHUNKS, 0)
    if not guessed:
        return None
    return (
        f"the server reported no usage for {guessed} requests: their output tokens are counted as "
        "chunks, which is too few if a chunk holds several"
    )


def _goodput(
    good: Sequence[RequestRecord], limits_ms: Mapping[str, float], duration: float
) -> Goodput:
    met = sum(
        all(
            (value := getattr(one, name)) is None or value * 1e3 <= limit
            for name, limit in limits_ms.items()
        )
        for one in good
    )
    return Goodput(dict(limits_ms), met, met / duration)


def _client(health: Sequence[ClientHealth], records: Sequence[RequestRecord]) -> Client:
    cpu = max((one.cpu_fraction for one in health), default=0.0)
    lags = [float(np.percentile(one.loop_lag, 99)) for one in health if one.loop_lag]
    lag = max(lags, default=0.0)
    send_lag = float(np.percentile([one.sent - one.due for one in records], 99))
    busy = None
    if cpu > BUSY_CPU:
        busy = f"it took {cpu:.0%} of a core"
    elif lag > BUSY_LAG_S:
        busy = f"its event loop was {lag * 1e3:.0f} ms late at the 99th percentile"
    return Client(len(health), cpu, lag * 1e3, send_lag * 1e3, busy)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
