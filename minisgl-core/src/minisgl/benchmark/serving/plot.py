"""A picture of a run: latencies over time and as distributions, tokens and requests over time."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.benchmark.serving.records import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_run(records: Sequence[RequestRecord], title: str, path: Path) -> None:
    """Write the picture of the successful requests to ``path``; its suffix is the format."""
    from matplotlib.figure import Figure

    good = sorted((one for one in records if one.error is None), key=lambda one: one.sent)
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes: Any = figure.subplots(2, 2)
    figure.suptitle(textwrap.fill(title, 150), fontsize=8)
    _plot_latencies(axes[0, 0], good)
    _plot_distributions(axes[0, 1], good)
    _plot_tokens(axes[1, 0], good)
    _plot_concurrency(axes[1, 1], records)
    figure.savefig(path, dpi=120)


def _plot_latencies(axes: "Axes", good: Sequence[RequestRecord]) -> None:
    for name in ("ttft", "e2e"):
        seconds = [getattr(one, name) for one in good]
        axes.scatter([one.sent for one in good], seconds, s=6, label=name.upper())
    axes.set(xlabel="sent at, s", ylabel="s", title="latency of each request", ylim=(0, None))
    axes.legend()


def _plot_distributions(axes: "Axes", good: Sequence[RequestRecord]) -> None:
    series = {
        "TTFT": [one.ttft for one in good if one.ttft is not None],
        "TPOT": [one.tpot for one in good if one.tpot is not None],
        "ITL": [value for one in good for value in one.intervals],
        "E2E": [one.e2e for one in good],
    }
    for name, seconds in series.items():
        if seconds:
            axes.ecdf(np.asarray(seconds) * 1e3, label=name)
    axes.set(xlabel="ms", ylabel="share of values below", title="distributions", xscale="log")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)


def _plot_tokens(axes: "Axes", good: Sequence[RequestRecord]) -> None:
    """Draw output tokens a second, each request's spread over the times of its chunks."""
    times, weights = [], []
    for one in good:
        if one.first_token is None or not one.output_tokens:
            continue
        at = one.first_token + np.concatenate(([0.0], np.cumsum(one.intervals)))
        times.append(at)
        weights.append(np.full(len(at), one.output_tokens / len(at)))
    end = max(one.ended for one in good)
    num_bins = int(np.clip(len(good), 10, 100))
    sums, edges = np.histogram(
        np.concatenate(times), bins=num_bins, range=(0, end), weights=np.concatenate(weights)
    )
    axes.stairs(sums / np.diff(edges), edges)
    axes.set(xlabel="s", ylabel="output tokens/s", title="throughput", ylim=(0, None))


def _plot_concurrency(axes: "Axes", records: Sequence[RequestRecord]) -> None:
    steps = sorted([(one.sent, 1) for one in records] + [(one.ended, -1) for one in records])
    times, changes = zip(*steps, strict=True)
    axes.step(times, np.cumsum(changes), where="post")
    axes.set(xlabel="s", ylabel="requests", title="requests at once", ylim=(0, None))
