"""``minisgl bench offline``: tokens per second of ``LLM`` on random prompts."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.benchmark.workload import PRESETS, Workload
from minisgl.cli.bench.numbers import number, seeds, token_range
from minisgl.cli.bench.output import check_writable, write_json
from minisgl.cli.flags import add_settings_arguments
from minisgl.errors import SettingsError
from minisgl.settings import ResolvedSettings

if TYPE_CHECKING:
    from minisgl.benchmark.offline import OfflineResult, Round, Spread

SUMMARY = "tokens per second of LLM.generate, rounds of random prompts in one process"

_DEFAULT = PRESETS["minisgl-offline"].workload
_OF_A_WORKLOAD = {
    "num_prompts": "--num-prompts",
    "input_len": "--input-len",
    "output_len": "--output-len",
    "shared_prefix_len": "--shared-prefix-len",
    "max_token_id": "--max-token-id",
    "temperature": "--temperature",
    "ignore_eos": "--ignore-eos",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the workload, what is written where, and all settings."""
    group = parser.add_argument_group(
        "workload", "A preset, or the parameters one by one; those left out are the first preset's."
    )
    group.add_argument(
        "--preset", choices=tuple(PRESETS),
        help="minisgl-offline: 256 prompts of 100 to 1024 tokens, as many out, at most 4096 tokens "
        "a request and 256 running; one-request: one of 512 tokens in and 512 out; shared-prefix: "
        "64 prompts that begin with the same 8192 tokens, 128 of their own and 256 out",
    )  # fmt: skip
    group.add_argument("--num-prompts", type=number, metavar="N", help="prompts of a round")
    group.add_argument(
        "--input-len", type=token_range, metavar="MIN:MAX", help="tokens of a prompt"
    )
    group.add_argument(
        "--output-len", type=token_range, metavar="MIN:MAX", help="tokens of an answer"
    )
    group.add_argument(
        "--shared-prefix-len", type=number, metavar="N",
        help="tokens that all prompts of a round begin with, before their own (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--max-token-id", type=number, metavar="N", help="prompts hold random ids from 0 to N"
    )
    group.add_argument(
        "--temperature", type=float, metavar="X", help="of every request; 0 takes the likeliest"
    )
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction,
        help="every answer has the length that was drawn for it",
    )  # fmt: skip
    group.add_argument(
        "--seeds", type=seeds, default=(0, 1, 2), metavar="N,...",
        help="a round each, with prompts of its own; the first one warms up (default: 0,1,2)",
    )  # fmt: skip
    group.add_argument(
        "--detokenize", action="store_true",
        help="also make text of the answers; the model's folder must hold a tokenizer then",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    output.add_argument(
        "--commit", metavar="HASH", help="commit to note, where the code runs outside its checkout"
    )
    output.add_argument(
        "--profile", type=Path, metavar="PATH",
        help="record decode steps of one more round as a chrome trace, and summarize it",
    )  # fmt: skip
    output.add_argument(
        "--profile-steps", type=number, default=10, metavar="N", help="how many (default: 10)"
    )
    output.add_argument(
        "--profile-host", action="store_true",
        help="record the host's operations too, which slows the host down and widens the gaps",
    )  # fmt: skip
    add_settings_arguments(parser)


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Run all rounds, print each as it ends, and write the record."""
    workload = _workload(args)
    if args.preset is not None:
        resolved = resolved.with_defaults(PRESETS[args.preset].settings, f"preset {args.preset}")
    if not args.detokenize:
        resolved = resolved.with_defaults({"model.skip_tokenizer_init": True}, "bench offline")
    path = resolved.settings.model.path
    if path is None:
        raise SettingsError("no model is given; type --model PATH_OR_ID")
    check_writable("--json", args.json)
    check_writable("--profile", args.profile)
    from minisgl.benchmark.environment import changed_settings, describe_environment
    from minisgl.benchmark.offline import ProfileRequest, bench_offline

    profile = None
    if args.profile is not None:
        profile = ProfileRequest(
            path=args.profile, num_steps=args.profile_steps, host=args.profile_host
        )
    changed = changed_settings(resolved)
    record: dict[str, Any] = {
        "benchmark": "offline",
        "model": Path(path).name,
        "preset": args.preset,
        "workload": dataclasses.asdict(workload),
        "settings": changed,
        **describe_environment(args.command_line, args.commit, resolved.settings.engine.device),
    }
    print(f"{Path(path).name} on {record['device']['name']}, commit {record['commit']}")
    print("settings: " + ", ".join(f"{name}={value}" for name, value in changed.items()))
    try:
        result = bench_offline(
            resolved.settings, workload, args.seeds, profile=profile,
            on_ready=_print_start, on_round=_print_round,
        )  # fmt: skip
    except SettingsError as error:
        if args.preset is None:
            raise
        brought = PRESETS[args.preset].settings.items()
        raise SettingsError(
            f"{error} (--preset {args.preset} brings "
            f"{', '.join(f'{name}={value}' for name, value in brought)}, and its requests have up "
            f"to {workload.most_tokens} tokens)"
        ) from error
    _print_end(result, args)
    write_json(args.json, record | result.as_dict())
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    """Return the preset, or what the flags say.

    Raises:
        SettingsError: both were given, or a value is out of range.
    """
    given = {name: value for name in _OF_A_WORKLOAD if (value := getattr(args, name)) is not None}
    if args.preset is not None and given:
        flags = ", ".join(_OF_A_WORKLOAD[name] for name in given)
        raise SettingsError(
            f"--preset {args.preset} says all about the workload; leave out {flags}, or --preset"
        )
    if not 0 <= given.get("temperature", 0) <= 100:
        raise SettingsError(f"--temperature must be from 0 to 100, got {args.temperature}")
    base = _DEFAULT if args.preset is None else PRESETS[args.preset].workload
    return dataclasses.replace(base, **given)


def _print_start(engine: dict[str, Any], load_s: float, ready_s: float | None) -> None:
    since = "" if ready_s is None else f"; {ready_s:.1f} s since the process began"
    print(
        f"{engine['architecture']} in {engine['dtype']}, {engine['num_pages']} pages of "
        f"{engine['page_size']} tokens; ready {load_s:.1f} s after LLM was called{since}"
    )
    print(
        f"{'seed':>8}{'prompts':>9}{'in':>9}{'out':>9}{'cached':>8}{'seconds':>9}{'tok/s':>9}"
        f"{'TTFT ms, p99':>18}{'TPOT ms, p99':>18}",
        flush=True,
    )


def _print_round(one: "Round") -> None:
    note = "" if one.counts else "  warm-up"
    print(
        f"{one.seed:>8}{one.num_prompts:>9}{one.num_input_tokens:>9}{one.num_output_tokens:>9}"
        f"{one.num_cached_tokens:>8}{one.seconds:>9.2f}{one.tokens_per_second:>9.0f}"
        f"{_spread(one.time_to_first_token_ms)}{_spread(one.time_per_output_token_ms)}{note}",
        flush=True,
    )


def _spread(spread: "Spread | None") -> str:
    return f"{'-':>18}" if spread is None else f"{spread.median:>9.1f}{spread.p99:>9.1f}"


def _print_end(result: "OfflineResult", args: argparse.Namespace) -> None:
    counted = [str(one.seed) for one in result.rounds if one.counts]
    print(f"median of seeds {', '.join(counted)}: {result.tokens_per_second:.0f} tok/s")
    if result.profile is not None:
        from minisgl.benchmark.trace import format_summary

        print(
            f"profile of {result.profile.num_running} running requests, seed "
            f"{result.profile.seed}: {args.profile}"
        )
        print(format_summary(result.profile.trace))
        if result.profile.pause_median_us is not None:
            print(
                "from the end of a graph to the start of the next, without the profiler: median "
                f"{result.profile.pause_median_us:.1f} us, 90th percentile "
                f"{result.profile.pause_p90_us:.1f} us"
            )
