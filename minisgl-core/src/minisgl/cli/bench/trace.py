"""``minisgl bench trace``: gaps between decode steps and the costliest kernels, from a trace."""

import argparse
import json
from pathlib import Path

from minisgl.cli.bench.numbers import number
from minisgl.cli.flags import add_settings_arguments
from minisgl.settings import ResolvedSettings

SUMMARY = "summarize a chrome trace of decode steps: idle time between graphs, kernels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the trace and the form of the answer."""
    parser.add_argument("trace", type=Path, metavar="PATH", help="written by bench offline")
    parser.add_argument(
        "--top", type=number, default=15, metavar="N", help="kernels to show (default: 15)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with all kernels")
    add_settings_arguments(parser, only=("log.level",))


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:  # noqa: ARG001
    """Print the summary."""
    from minisgl.benchmark.trace import format_summary, summarize_file

    summary = summarize_file(args.trace)
    if args.json:
        print(json.dumps(summary.as_dict(), indent=2))
    else:
        print(format_summary(summary, args.top))
    return 0
