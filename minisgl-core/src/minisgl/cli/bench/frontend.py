"""``minisgl bench frontend``: the server without its engine, under load."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.cli.bench.numbers import names, number
from minisgl.cli.bench.output import check_writable, write_json
from minisgl.cli.flags import add_settings_arguments
from minisgl.errors import SettingsError
from minisgl.settings import ResolvedSettings

if TYPE_CHECKING:
    from minisgl.benchmark.frontend import FrontendLoad, FrontendResult

SUMMARY = "tokens per second and latency of everything in front of the engine"

_PARTS = ("idle", "paced", "flat-out", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--parts", type=names(_PARTS), default=_PARTS[:3], metavar="NAME,...",
        help="idle: one stream; paced: all streams, an engine of --rate; flat-out: an engine that "
        "emits as fast as it can; memory: as flat-out, many short answers "
        "(default: idle,paced,flat-out)",
    )  # fmt: skip
    parser.add_argument(
        "--streams", type=number, default=256, metavar="N", help="at once (default: 256)"
    )
    parser.add_argument(
        "--output-len", type=number, default=128, metavar="N",
        help="tokens of an answer (default: 128)",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=number, default=2048, metavar="N",
        help="of paced and flat-out each (default: 2048)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=number, default=22000, metavar="N",
        help="tokens a second that the paced engine emits for all streams (default: 22000)",
    )  # fmt: skip
    parser.add_argument(
        "--memory-requests", type=number, default=50000, metavar="N", help="(default: 50000)"
    )
    parser.add_argument(
        "--memory-output-len", type=number, default=4, metavar="N", help="(default: 4)"
    )
    parser.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="(default: chat)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument(
        "--commit", metavar="HASH", help="commit to note, where the code runs outside its checkout"
    )
    add_settings_arguments(
        parser,
        only=(
            "model.path", "model.tokenizer", "server.num_tokenizers", "plugins.disabled",
            "log.level",
        ),
    )  # fmt: skip


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Measure each part with a server of its own, and print it as it comes."""
    check_writable("--json", args.json)
    from minisgl.benchmark.environment import describe_environment
    from minisgl.benchmark.frontend import bench_frontend

    if resolved.settings.model.path is None:
        raise SettingsError("no model is given; type --model PATH_OR_ID")
    if args.streams > args.requests // 2:
        raise SettingsError(
            f"--requests {args.requests} must be at least twice --streams {args.streams}"
        )
    resolved = resolved.with_defaults({"server.port": 0, "log.level": "warning"}, "bench frontend")
    record = {
        "benchmark": "frontend",
        **describe_environment(args.command_line, args.commit, "cpu"),
    }
    print(
        f"{'part':<10}{'streams':>8}{'tok/s':>9}{'tok/event':>10}{'latency ms p50':>16}{'p99':>8}"
        f"{'TTFT ms p50':>13}{'p99':>8}"
    )
    results = []
    for part in args.parts:
        results.append(bench_frontend(resolved.settings, _load(part, args)))
        _print(results[-1])
    by_part = {one.load.name: one for one in results}
    if by_part.keys() >= {"idle", "paced"}:
        added = by_part["paced"].latency_ms["p99"] - by_part["idle"].latency_ms["p99"]
        print(f"the load of the paced part adds {added:.1f} ms to the latency of idle (p99)")
    write_json(args.json, record | {"parts": [one.as_dict() for one in results]})
    return 0


def _load(part: str, args: argparse.Namespace) -> "FrontendLoad":
    from minisgl.benchmark.frontend import FrontendLoad

    step_s = args.streams / args.rate if part in {"idle", "paced"} else 0.0
    streams = 1 if part == "idle" else args.streams
    requests, length = args.requests, args.output_len
    if part == "idle":
        requests = max(2, round(5 / (length * step_s)))
    if part == "memory":
        requests, length = args.memory_requests, args.memory_output_len
    return FrontendLoad(
        name=part, streams=streams, num_requests=requests, output_len=length, step_s=step_s,
        endpoint=args.endpoint,
    )  # fmt: skip


def _print(result: "FrontendResult") -> None:
    latency, ttft = result.latency_ms, result.ttft_ms
    print(
        f"{result.load.name:<10}{result.load.streams:>8}{result.tokens_per_s:>9.0f}"
        f"{result.tokens_per_event:>10.2f}{latency['p50']:>16.1f}{latency['p99']:>8.1f}"
        f"{ttft['p50']:>13.1f}{ttft['p99']:>8.1f}"
    )
    cpu = result.cpu_us_per_token
    parts = ", ".join(f"{name} {us:.1f}" for name, us in cpu.items())
    print(f"          CPU us a token: {parts}; all {sum(cpu.values()):.1f}")
    memory = ", ".join(
        f"{name} {settled:.0f} -> {end:.0f}" for name, (settled, end) in result.memory_mib.items()
    )
    print(f"          MiB after a tenth of the requests and at the end: {memory}", flush=True)
