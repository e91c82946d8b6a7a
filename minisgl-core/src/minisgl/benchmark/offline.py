"""``minisgl bench offline``: tokens per second of ``LLM.generate``, rounds of random prompts.

All rounds run in one process, one after the other, each with prompts of its own, so the prefix
cache cannot answer them. The first round warms up and does not count.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from minisgl.benchmark.environment import process_age
from minisgl.benchmark.step_profiler import StepProfiler
from minisgl.benchmark.trace import TraceSummary, summarize_file
from minisgl.benchmark.workload import Workload
from minisgl.engine.engine import Engine
from minisgl.errors import SettingsError
from minisgl.llm import LLM, GenerationResult
from minisgl.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and 99th percentile over the requests of a round, milliseconds."""

    median: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round.

    Attributes:
        seed: of its prompts.
        counts: whether it belongs to the result; the first round warms up.
        num_prompts, num_input_tokens, num_output_tokens: what went in and came out.
        num_cached_tokens: prompt tokens that the prefix cache supplied all the same.
        seconds: from the call of ``LLM.generate`` to its return.
        time_to_first_token_ms: from that call to a request's first token.
        time_per_output_token_ms: between a request's first token and its last, a token; ``None``
            if every answer has just one.
    """

    seed: int
    counts: bool
    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    seconds: float
    time_to_first_token_ms: Spread | None
    time_per_output_token_ms: Spread | None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a recorded round says about decode steps.

    Attributes:
        seed: of the round, which does not count.
        num_running: requests that were still running when the recording began.
        trace: of the recorded steps.
        pause_median_us, pause_p90_us: from the end of a decode graph to the start of the next by
            CUDA events, in steps that no profiler slowed down; ``None`` without graphs.
    """

    seed: int
    num_running: int
    trace: TraceSummary
    pause_median_us: float | None = None
    pause_p90_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to record: where to, how many steps, and whether the host's operations too."""

    path: Path
    num_steps: int
    host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """All rounds of one process.

    Attributes:
        engine: facts about the engine, as plain data.
        load_s: seconds that the construction of ``LLM`` took.
        ready_s: seconds from the start of the process until then, Python's own start and all
            imports included; ``None`` where the system does not tell when the process began.
        rounds: in order.
        profile: if one was asked for.
    """

    engine: dict[str, Any]
    load_s: float
    ready_s: float | None
    rounds: tuple[Round, ...]
    profile: Profile | None

    @property
    def tokens_per_second(self) -> float:
        """Median of the rounds that count."""
        return median(one.tokens_per_second for one in self.rounds if one.counts)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "engine": self.engine,
            "startup": {"process_to_ready_s": self.ready_s, "load_s": self.load_s},
            "rounds": [one.as_dict() for one in self.rounds],
            "tokens_per_second": self.tokens_per_second,
            "profile": None if self.profile is None else asdict(self.profile),
        }


def bench_offline(
    settings: Settings,
    workload: Workload,
    seeds: Sequence[int],
    *,
    profile: ProfileRequest | None = None,
    on_ready: Callable[[dict[str, Any], float, float | None], object] = lambda *_: None,
    on_round: Callable[[Round], object] = lambda _: None,
) -> OfflineResult:
    """Load the model once and run a round for each seed.

    Args:
        settings: of the engine.
        workload: what each round sends.
        seeds: of the rounds, at least two; the first one warms up.
        profile: record steps of one more round, which does not count.
        on_ready: told the engine's facts, ``load_s`` and ``ready_s``.
        on_round: told each round as it ends.

    Raises:
        MinisglError: the model cannot be loaded, or a request cannot be served.
    """
    began = time.perf_counter()
    with LLM(settings=settings, progress=sys.stderr.isatty()) as llm:
        load_s, ready_s = time.perf_counter() - began, process_age()
        if workload.max_token_id >= llm.info.vocab_size:
            raise SettingsError(
                f"--max-token-id {workload.max_token_id}: the model's ids go from 0 to "
                f"{llm.info.vocab_size - 1}"
            )
        engine = asdict(llm.info)
        on_ready(engine, load_s, ready_s)
        rounds = []
        for number, seed in enumerate(seeds):
            rounds.append(_run_round(llm, workload, seed, counts=number > 0))
            on_round(rounds[-1])
        recorded = None
        if profile is not None:
            recorded = _run_profile(llm, workload, max(seeds) + 1, profile)
    return OfflineResult(
        engine=engine, load_s=load_s, ready_s=ready_s, rounds=tuple(rounds), profile=recorded
    )


def _run_round(llm: LLM, workload: Workload, seed: int, *, counts: bool) -> Round:
    prompts, params = workload.requests(seed)
    began = time.perf_counter()
    results = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - began
    return Round(
        seed=seed,
        counts=counts,
        num_prompts=len(prompts),
        num_input_tokens=sum(one.num_prompt_tokens for one in results),
        num_output_tokens=sum(len(one.token_ids) for one in results),
        num_cached_tokens=sum(one.num_cached_tokens for one in results),
        seconds=seconds,
        time_to_first_token_ms=_spread([one.time_to_first_token for one in results]),
        time_per_output_token_ms=_spread([_time_per_token(one) for one in results]),
    )


def _run_profile(llm: LLM, workload: Workload, seed: int, wanted: ProfileRequest) -> Profile:
    prompts, params = workload.requests(seed)
    on_gpu = llm.info.device.startswith("cuda")
    graphs = llm.engine.graphs if isinstance(llm.engine, Engine) else None
    profiler = StepProfiler(
        wanted.path, wanted.num_steps, on_gpu=on_gpu, host=wanted.host, graphs=graphs
    )
    llm.generate(prompts, params, progress=False, on_step=profiler)
    profiler.close()
    pauses = profiler.pauses_us
    return Profile(
        seed=seed,
        num_running=profiler.num_running,
        trace=summarize_file(wanted.path),
        pause_median_us=median(pauses) if pauses else None,
        pause_p90_us=float(np.percentile(pauses, 90)) if pauses else None,
    )


def _time_per_token(result: GenerationResult) -> float | None:
    """Return the seconds between tokens, on average; ``None`` for an answer of one token."""
    if result.time_to_first_token is None or len(result.token_ids) < 2:
        return None
    return (result.total_time - result.time_to_first_token) / (len(result.token_ids) - 1)


def _spread(seconds: Sequence[float | None]) -> Spread | None:
    known = [value * 1e3 for value in seconds if value is not None]
    if not known:
        return None
    return Spread(median=median(known), p99=float(np.percentile(known, 99)))
