"""What ``minisgl bench serve`` prints and writes."""

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any, Final, Self

from minisgl.benchmark.serving.figures import token_count_note

if TYPE_CHECKING:
    from minisgl.benchmark.serving.figures import Figures
    from minisgl.benchmark.serving.records import LoadResult

_COLUMNS: Final = ("mean", "median", "p90", "p95", "p99", "max")


class Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="req", disable=not sys.stderr.isatty())

    def __call__(self, _: object) -> None:
        """Count a request."""
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def print_figures(figures: "Figures") -> None:
    """Print the table, what failed, and what makes the figures doubtful."""
    rows = {
        "successful requests": f"{figures.successful}",
        "failed requests": f"{figures.failed}",
        "duration, s": f"{figures.duration_s:.2f}",
        "requests/s": f"{figures.requests_per_s:.2f}",
        "input tokens": _maybe(figures.input_tokens, "d"),
        "  of them cached": _maybe(figures.cached_tokens, "d"),
        "output tokens": f"{figures.output_tokens}",
        "input tokens/s": _maybe(figures.input_tokens_per_s, ".1f"),
        "output tokens/s": f"{figures.output_tokens_per_s:.1f}",
        "output tokens a chunk": _maybe(figures.tokens_per_chunk, ".2f"),
        "requests at once, mean": f"{figures.mean_concurrency:.1f}",
        "requests at once, most": f"{figures.max_concurrency}",
    }
    if figures.goodput is not None:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in figures.goodput.limits_ms.items())
        rows[f"goodput ({limits}), requests/s"] = f"{figures.goodput.requests_per_s:.2f}"
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value:>12}")
    print(
        f"{'ms':<6}"
        + "".join(f"{name:>10}" for name in ("mean", "median", "p90", "p95", "p99", "max"))
    )
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread = getattr(figures, f"{name}_ms")
        cells = (
            "         -"
            if spread is None
            else "".join(f"{getattr(spread, column):>10.2f}" for column in _COLUMNS)
        )
        print(f"{name.upper():<6}{cells}")
    for reason, count in figures.failures.items():
        print(f"failed {count} times: {reason}")
    client = figures.client
    print(
        f"client: {client.processes} processes, {client.cpu_fraction:.0%} of a core, event loop "
        f"{client.loop_lag_p99_ms:.1f} ms late (p99), requests sent up to "
        f"{client.send_lag_p99_ms:.1f} ms after they were due (p99, waiting for a place included)"
    )
    notes = [token_count_note(figures)]
    if client.busy is not None:
        notes.append(
            f"the client was busy ({client.busy}): latencies may be its own; try more --processes, "
            "or another machine"
        )
    for note in filter(None, notes):
        print(f"warning: {note}", file=sys.stderr)


def _maybe(value: float | None, form: str) -> str:
    return "not reported" if value is None else format(value, form)


def describe_load(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked for, as plain data, without the key."""
    names = (
        "base_url", "endpoint", "dataset", "num_prompts", "input_len", "output_len", "prompt_form",
        "max_token_id", "num_groups", "prefix_len", "trace_file", "trace_unit", "trace_speedup",
        "tokenizer",
        "seed", "burstiness", "max_concurrency", "warmup", "processes", "ignore_eos", "extra_body",
    )  # fmt: skip
    found = {name: getattr(args, name) for name in names}
    found["trace_file"] = None if args.trace_file is None else str(args.trace_file)
    rate = args.request_rate
    found["request_rate"] = "inf" if rate is not None and math.isinf(rate) else rate
    return found


def describe_requests(result: "LoadResult") -> list[dict[str, Any]]:
    """Return every request as plain data."""
    import msgspec

    return [
        {**msgspec.to_builtins(one), "ttft": one.ttft, "tpot": one.tpot, "e2e": one.e2e}
        for one in result.records
    ]
