"""Reads a chrome trace of torch's profiler: gaps between decode steps, and where a step goes.

A *step* is everything that one launch of a CUDA graph ran on the device: the kernels, copies and
fills that carry the correlation id of one ``cudaGraphLaunch``. Its *span* goes from the start of
the first of them to the end of the last. The *idle time* between two consecutive steps is the time
from the end of one to the start of the next during which nothing else ran on the device: other
activity in between (copies, kernels outside of the graph) is not idle and is taken off.

Times are microseconds, as in the trace.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from minisgl.errors import SettingsError

_ON_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH_CALLS: Final = frozenset({"cuda_runtime", "cuda_driver"})
_GRAPH_LAUNCHES: Final = ("cudaGraphLaunch", "cuGraphLaunch")
"""What the names of the calls begin with; some versions append a suffix."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Activity:
    """Something that ran on the device from ``start`` to ``end``."""

    name: str
    start: float
    end: float
    correlation: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of a graph, its activities in the order of their starts."""

    activities: tuple[Activity, ...]

    @property
    def start(self) -> float:
        """When the first activity began."""
        return self.activities[0].start

    @property
    def end(self) -> float:
        """When the last one to end had ended."""
        return max(activity.end for activity in self.activities)

    @property
    def busy(self) -> float:
        """Time during which at least one of its activities ran."""
        return covered([(a.start, a.end) for a in self.activities], self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """What one kernel costs, per step.

    Attributes:
        name: of the kernel, or of the kind of copy.
        calls: times a step.
        us: total time a step; kernels that overlap each count in full.
    """

    name: str
    calls: float
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a trace says about decode steps; without at least two graph launches only the count.

    Attributes:
        num_steps: launches of graphs.
        idle_us: idle time between each two consecutive steps, in order.
        idle_median_us, idle_p90_us: of those.
        period_median_us: from the start of a step to the start of the next.
        span_median_us: from the start of a step to its end.
        gaps_in_step_us: median of the time within a step's span when none of its kernels ran.
        kernels: by total time a step, largest first: all activity from the start of the first
            step to the start of the last, divided by the steps between.
    """

    num_steps: int
    idle_us: tuple[float, ...] = ()
    idle_median_us: float | None = None
    idle_p90_us: float | None = None
    period_median_us: float | None = None
    span_median_us: float | None = None
    gaps_in_step_us: float | None = None
    kernels: tuple[KernelTime, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def summarize_file(path: Path) -> TraceSummary:
    """Summarize a trace, plain or gzipped.

    Raises:
        SettingsError: the file cannot be read, or is no chrome trace.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        trace = json.loads(text)
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise SettingsError(
            f"{str(path)!r} is no chrome trace that can be read: {error}"
        ) from error
    return summarize(events)


def summarize(events: Iterable[Mapping[str, Any]]) -> TraceSummary:
    """Summarize the ``traceEvents`` of a chrome trace; one device is looked at as a whole."""
    activities, launches = _read(events)
    steps = steps_of(activities, launches)
    if len(steps) < 2:
        return TraceSummary(num_steps=len(steps))
    in_steps = {id(activity) for step in steps for activity in step.activities}
    others = [(a.start, a.end) for a in activities if id(a) not in in_steps]
    idle = tuple(idle_between(before, after, others) for before, after in pairwise(steps))
    return TraceSummary(
        num_steps=len(steps),
        idle_us=idle,
        idle_median_us=median(idle),
        idle_p90_us=float(np.percentile(idle, 90)),
        period_median_us=median(after.start - before.start for before, after in pairwise(steps)),
        span_median_us=median(step.end - step.start for step in steps),
        gaps_in_step_us=median(step.end - step.start - step.busy for step in steps),
        kernels=_kernel_times(activities, steps),
    )


def steps_of(activities: Sequence[Activity], launches: Iterable[int]) -> list[Step]:
    """Return the steps in the order of their starts.

    Args:
        activities: all that ran on the device, in the order of their starts.
        launches: correlation ids of graph launches; one that ran nothing gives no step.
    """
    by_launch: dict[int, list[Activity]] = {launch: [] for launch in launches}
    for activity in activities:
        if activity.correlation in by_launch:
            by_launch[activity.correlation].append(activity)
    steps = [Step(tuple(members)) for members in by_launch.values() if members]
    return sorted(steps, key=lambda step: step.start)


def idle_between(before: Step, after: Step, others: Sequence[Interval]) -> float:
    """Return the idle time between two steps, 0 if they overlap.

    Args:
        before: a step.
        after: the next one.
        others: what ran on the device outside of any step.
    """
    gap = after.start - before.end
    return max(0.0, gap - covered(others, before.end, after.start))


def covered(intervals: Iterable[Interval], low: float, high: float) -> float:
    """Return how much of ``[low, high]`` lies in at least one of ``intervals``."""
    total, reached = 0.0, low
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, high)  # noqa: PLW2901
        if end > start:
            total += end - start
            reached = end
    return total


def format_summary(summary: TraceSummary, top: int = 15) -> str:
    """Return a summary for people, with the ``top`` kernels."""
    if summary.num_steps < 2:
        return (
            f"{summary.num_steps} launches of CUDA graphs in the trace: at least 2 are needed to "
            "say anything about decode steps"
        )
    period = summary.period_median_us
    medians = (
        f"{period:.1f} us from start to start, {summary.span_median_us:.1f} us a step, "
        f"{summary.gaps_in_step_us:.1f} us of it between kernels"
    )
    idle = f"median {summary.idle_median_us:.1f} us, 90th percentile {summary.idle_p90_us:.1f} us"
    lines = [
        f"{summary.num_steps} decode steps; medians: {medians}",
        f"idle between steps: {idle}",
        f"{'us a step':>10}{'share':>8}{'calls':>8}  kernel",
    ]
    assert period is not None
    lines += [
        f"{kernel.us:>10.1f}{kernel.us / period:>8.1%}{kernel.calls:>8.1f}  {kernel.name[:100]}"
        for kernel in summary.kernels[:top]
    ]
    return "\n".join(lines)


def _read(events: Iterable[Mapping[str, Any]]) -> tuple[list[Activity], list[int]]:
    """Return what ran on the device, by start, and the correlation ids of graph launches."""
    activities, launches = [], []
    for event in events:
        category, name = event.get("cat"), str(event.get("name", ""))
        if event.get("ph") != "X" or category is None:
            continue
        correlation = event.get("args", {}).get("correlation")
        if category in _ON_DEVICE:
            start = float(event["ts"])
            activities.append(Activity(name, start, start + float(event["dur"]), correlation))
        elif category in _LAUNCH_CALLS and name.startswith(_GRAPH_LAUNCHES):
            launches.append(correlation)
    return sorted(activities, key=lambda activity: activity.start), launches


def _kernel_times(activities: Iterable[Activity], steps: Sequence[Step]) -> tuple[KernelTime, ...]:
    first, last, num_steps = steps[0].start, steps[-1].start, len(steps) - 1
    times: dict[str, list[float]] = {}
    for activity in activities:
        if first <= activity.start < last:
            times.setdefault(activity.name, []).append(activity.end - activity.start)
    found = [
        KernelTime(name=name, calls=len(all_) / num_steps, us=sum(all_) / num_steps)
        for name, all_ in times.items()
    ]
    return tuple(sorted(found, key=lambda kernel: -kernel.us))
