"""``minisgl bench host``: what a step costs the host, as a table or JSON."""

import argparse
import json
import sys

from minisgl.cli.bench.numbers import number, numbers
from minisgl.cli.flags import add_settings_arguments
from minisgl.errors import SettingsError
from minisgl.settings import ResolvedSettings

SUMMARY = "microseconds that a step costs the host, by part, with a null engine"

_PARTS = ("receive", "choose", "stage", "commit", "send")
_COLUMNS = ("steps", "tokens", *_PARTS, "cpu", "mean", "p50", "p99")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--rows", type=numbers, default=(1, 32, 256, 1024), metavar="N,...",
        help="requests at once (default: 1,32,256,1024)",
    )  # fmt: skip
    parser.add_argument(
        "--page-sizes", type=_page_sizes, default=(16, 1), metavar="N,...",
        help="tokens a page (default: 16,1)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=number, default=2000, metavar="N",
        help="decode steps to measure for each (default: 2000); 100000 of a single set-up show "
        "growth of memory",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--profile", action="store_true", help="print where the time goes, function by function"
    )
    add_settings_arguments(parser, only=("log.level",))


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:  # noqa: ARG001
    """Measure each page size and print it as it comes."""
    from minisgl.benchmark.host import HostResult, bench_hosts, growth

    if args.profile:
        return _profile(args)
    results: list[HostResult] = []
    if not args.json:
        print("microseconds a step; overlap on, detokenizer messages sent over a socket")
        print("rows  page  kind    " + "".join(f"{name:>9}" for name in _COLUMNS))
    for page_size in args.page_sizes:
        of_size = bench_hosts(args.rows, page_size, args.steps)
        results += of_size
        if not args.json:
            for result in of_size:
                _print(result)
    if args.json:
        print(json.dumps([result.as_dict() for result in results], indent=2))
        return 0
    for page_size, times in growth(results).items():
        print(f"page size {page_size}: 1024 rows cost {times:.1f} times what 32 rows cost")
    return 0


def _print(result: "HostResult") -> None:  # type: ignore[name-defined]  # noqa: F821
    for kind, summary in (
        ("decode", result.decode.summary()),
        ("prefill", result.prefill.summary()),
        ("serving", result.serving.summary()),
    ):
        if summary["steps"]:
            cells = "".join(
                f"{summary[name]:>9.0f}"
                if name in {"steps", "tokens"}
                else f"{summary[name]:>9.1f}"
                for name in _COLUMNS
            )
            print(f"{result.rows:>4}  {result.page_size:>4}  {kind:<8}{cells}")
    note = f"            {result.num_comparisons} comparisons of staged bytes, all equal"
    if result.memory_growth is not None:
        steps = result.settled_steps
        note += f"; memory grew by {result.memory_growth} bytes in the last {steps} steps"
    print(note, flush=True)


def _profile(args: argparse.Namespace) -> int:
    import cProfile
    import pstats

    from minisgl.benchmark.host import bench_host

    for page_size in args.page_sizes:
        for rows in args.rows:
            profile = cProfile.Profile()
            with profile:
                bench_host(rows, page_size, args.steps)
            print(f"{rows} rows, page size {page_size}; the profiler itself doubles the times")
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(25)
    return 0


def _page_sizes(text: str) -> tuple[int, ...]:
    sizes = numbers(text)
    if max(sizes) > 256:
        raise SettingsError(f"--page-sizes: a page has at most 256 tokens, got {max(sizes)}")
    return sizes
