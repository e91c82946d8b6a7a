"""What ``/metrics`` tells Prometheus, under the names that users of vLLM and SGLang know.

Counts come from the replies that pass through this process and, for what only the scheduler knows,
from its last heartbeat. Nothing here ever fails a request: see ``EngineClient``.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from minisgl.message import ErrorReply, Pong, TextReply
from minisgl.request import FinishReason

PREFIX: Final = "minisgl:"
MODEL_LABEL: Final = "model_name"
LATENCY_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
COUNT_BUCKETS: Final = tuple(
    float(digit * 10**exponent) for exponent in range(6) for digit in (1, 2, 5)
)


@dataclass(slots=True)
class _Times:
    """When one answer was asked for, began and went on; seconds of the monotonic clock."""

    asked: float
    first: float | None = None
    last: float = 0.0


class EngineMetrics:
    """Follows every answer from its request to its end.

    Args:
        model_name: label of every metric.
        heartbeat: returns the scheduler's last one.
        num_dropped: returns, by process, how many messages were none.
    """

    def __init__(
        self,
        model_name: str,
        heartbeat: Callable[[], Pong | None],
        num_dropped: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._running: dict[int, _Times] = {}
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that the prefix cache supplied."
        )
        self._generated = self._counter("generation_tokens", "Generated tokens.")
        self._successes = Counter(
            f"{PREFIX}request_success",
            "Answers that ended, by reason.",
            [MODEL_LABEL, "finished_reason"],
            registry=self.registry,
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
            self._successes.labels(model_name, str(reason))  # exported from the start, as 0
        self._failures = self._counter("request_failure", "Answers that were refused or failed.")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From request to first text.", LATENCY_BUCKETS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time between the tokens of an answer, behind its first text.",
            TOKEN_LATENCY_BUCKETS,
        )
        self._total = self._histogram(
            "e2e_request_latency_seconds", "From request to the end of an answer.", REQUEST_BUCKETS
        )
        self._prompt_sizes = self._histogram(
            "request_prompt_tokens", "Prompt tokens of an answer.", COUNT_BUCKETS
        )
        self._answer_sizes = self._histogram(
            "request_generation_tokens", "Generated tokens of an answer.", COUNT_BUCKETS
        )
        self._between = _CheapHistogram(
            f"{PREFIX}inter_token_latency_seconds",
            "Time between an answer's increments, divided by their tokens.",
            TOKEN_LATENCY_BUCKETS,
            model_name,
        )
        self.registry.register(self._between)
        self.registry.register(_Heartbeat(model_name, heartbeat))
        self.registry.register(_Dropped(num_dropped))

    def asked(self, uids: Sequence[int]) -> None:
        """Note that these answers have been asked for."""
        now = time.monotonic()
        for uid in uids:
            self._running[uid] = _Times(now)

    def replied(self, replies: Sequence[TextReply]) -> None:
        """Note what one step has brought."""
        now = time.monotonic()
        num_tokens = 0
        for reply in replies:
            times = self._running.get(reply.uid)
            if times is None:
                continue
            num_new = len(reply.token_ids)
            num_tokens += num_new
            if times.first is None:
                times.first = now
                self._first_token.observe(now - times.asked)
            elif num_new:
                self._between.observe((now - times.last) / num_new)
            times.last = now
            if reply.finish_reason is not None:
                self._ended(reply, self._running.pop(reply.uid), now)
        if num_tokens:
            self._generated.inc(num_tokens)

    def failed(self, reply: ErrorReply) -> None:
        """Note that an answer was refused or failed."""
        if self._running.pop(reply.uid, None) is not None:
            self._failures.inc()

    def left(self, uids: Sequence[int]) -> None:
        """Note that the client has left while these answers ran, or before they began."""
        for uid in uids:
            if self._running.pop(uid, None) is not None:
                self._successes.labels(self._model_name, str(FinishReason.ABORT)).inc()

    def _ended(self, reply: TextReply, times: _Times, now: float) -> None:
        self._successes.labels(self._model_name, reply.finish_reason).inc()
        self._prompt_tokens.inc(reply.num_prompt_tokens)
        self._cached_tokens.inc(reply.num_cached_tokens)
        self._total.observe(now - times.asked)
        self._prompt_sizes.observe(reply.num_prompt_tokens)
        self._answer_sizes.observe(reply.num_completion_tokens)
        if times.first is not None and reply.num_completion_tokens > 1:
            self._per_token.observe((now - times.first) / (reply.num_completion_tokens - 1))

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"{PREFIX}{name}", text, [MODEL_LABEL], registry=self.registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"{PREFIX}{name}", text, [MODEL_LABEL], registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._model_name)


class HttpMetrics:
    """Counts HTTP requests and responses by route.

    Args:
        registry: where they are exported.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests.", ["handler", "method"], registry=registry
        )
        self._responses = Counter(
            f"{PREFIX}http_responses",
            "HTTP responses; 499 stands for a client that left.",
            ["handler", "method", "status"],
            registry=registry,
        )

    def count(self, handler: str, method: str, status: int) -> None:
        """Count one request and its response."""
        self._requests.labels(handler, method).inc()
        self._responses.labels(handler, method, str(status)).inc()


class _CheapHistogram(Collector):
    """A histogram for one event a token: prometheus_client's own costs microseconds each."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], model_name: str) -> None:
        self._name = name
        self._text = text
        self._bounds = list(buckets)
        self._labels = [model_name]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """Return the cumulated buckets."""
        family = HistogramMetricFamily(self._name, self._text, labels=[MODEL_LABEL])
        total, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(self._labels, buckets, self._sum)
        yield family


class _Dropped(Collector):
    """Messages between processes that were none: somebody else writes to the sockets."""

    def __init__(self, num_dropped: Callable[[], Mapping[str, int]]) -> None:
        self._num_dropped = num_dropped

    def collect(self) -> Iterator[Metric]:
        """Return a counter for each process."""
        counter = CounterMetricFamily(
            f"{PREFIX}dropped_messages", "Messages that were none.", labels=["process"]
        )
        for process, count in self._num_dropped().items():
            counter.add_metric([process], count)
        yield counter


class _Heartbeat(Collector):
    """What only the scheduler knows, as its last heartbeat told; nothing before the first one."""

    def __init__(self, model_name: str, heartbeat: Callable[[], Pong | None]) -> None:
        self._labels = [model_name]
        self._heartbeat = heartbeat

    def collect(self) -> Iterator[Metric]:
        """Return gauges and counters."""
        beat = self._heartbeat()
        if beat is None:
            return
        used = 1 - beat.num_free_pages / beat.num_pages if beat.num_pages else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests that have a row.", beat.num_running),
            ("num_requests_waiting", "Requests in the queue.", beat.num_waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV pool that running requests use; 1 is all of it.",
                used,
            ),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[MODEL_LABEL])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("scheduler_steps", "Steps of the engine.", beat.num_steps),
            ("num_preemptions", "Requests that were retracted.", beat.num_retracted),
            (
                "prefix_cache_queries",
                "Prompt tokens that were looked up in the prefix cache.",
                beat.num_queried_tokens,
            ),
            (
                "prefix_cache_hits",
                "Prompt tokens that the prefix cache held.",
                beat.num_cached_tokens,
            ),
        ):
            counter = CounterMetricFamily(f"{PREFIX}{name}", text, labels=[MODEL_LABEL])
            counter.add_metric(self._labels, value)
            yield counter
