"""``minisgl bench kernels``: attention, operations and experts beside what the device can do."""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.cli.bench import attention
from minisgl.cli.bench.numbers import numbers, words
from minisgl.cli.bench.output import check_writable, write_json
from minisgl.cli.flags import add_settings_arguments
from minisgl.errors import SettingsError
from minisgl.settings import ResolvedSettings, Settings

if TYPE_CHECKING:
    import torch

    from minisgl.benchmark.attention_cases import AttentionCase
    from minisgl.benchmark.kernels import Measured
    from minisgl.benchmark.moe_cases import MoeShape
    from minisgl.benchmark.op_cases import ModelShape
    from minisgl.benchmark.timing import Target
    from minisgl.plugins.host import PluginHost

SUMMARY = "attention, operations and experts at given shapes, and the share of what the device can"

_DEFAULT_MODEL = "Qwen3-0.6B"
_COLUMNS = f"{'case':<36}{'by':<16}{'us':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of most':>9}  clock"
_OP_ROWS = (1, 64, 256, 8192)
_QUICK = 0.1
"""``--quick`` measures so much shorter, and a CPU's ceilings with so much smaller inputs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is measured, and the settings that matter to it."""
    parser.add_argument(
        "--only",
        choices=("attention", "ops", "moe"),
        help="measure only one of the three (default: all that the model has)",
    )
    parser.add_argument(
        "--backends", type=words, metavar="NAME,...", help="attention backends (default: all)"
    )
    parser.add_argument(
        "--cases", type=words, metavar="CASE,...",
        help="attention cases: names, such as decode-256 or prefill-8k, or a shape of your own, "
        "such as decode:256x450-1350:16/8x128:p16 (rows x tokens, query/KV heads x head dim, page "
        "size); by default all, or the small ones on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=numbers, metavar="N,...",
        help="rows of the operations (default: 1,64,256,8192), tokens of the routed experts "
        "(default: 1,16,64,256,4096)",
    )  # fmt: skip
    attention.add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="less exact, in a tenth of the time")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument(
        "--commit", metavar="HASH", help="commit to note, where the code runs outside its checkout"
    )
    add_settings_arguments(
        parser,
        only=(
            "model.path", "model.dtype", "moe.backend", "moe.weights_dtype", "engine.device",
            "engine.num_threads", "plugins.disabled", "log.level",
        ),
    )  # fmt: skip


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Check all that was typed, measure the ceilings, then each case, and print it as it comes."""
    check_writable("--json", args.json)
    attention.check_arguments(args)
    _check_only(args)
    if args.read is not None:
        return attention.show_file(args.read, args.picture)
    from minisgl.bootstrap.experts import weights_dtype_of

    settings = resolved.settings
    host, device, dtype = _load(settings)
    if args.attention:
        weights_dtype_of(settings, "--attention measures none")
        chosen = attention.choose(args, settings, host, device, dtype)
        target, environment = _measure(args, settings, device, dtype)
        return attention.run_grid(
            args, resolved, host, chosen, target=target, environment=environment
        )
    from minisgl.benchmark.environment import changed_settings
    from minisgl.benchmark.kernels import bench_attention
    from minisgl.benchmark.op_cases import model_shape

    reference = settings.model.path or _DEFAULT_MODEL
    shape = model_shape(reference)
    cases = _attention_cases(args, settings, host, device, dtype)
    backends = attention.named_backends(args, host)
    experts = _experts(args, reference, host, resolved)
    target, environment = _measure(args, settings, device, dtype)
    print(_COLUMNS, flush=True)
    found: dict[str, list[Measured]] = {"attention": [], "ops": [], "moe": []}
    if cases:
        found["attention"] = _printed(bench_attention(cases, backends, host, settings, target))
    if args.only in (None, "ops"):
        found["ops"] = _ops(args, shape, host, target)
    if experts is not None:
        found["moe"] = _moe(args, shape, experts, host, resolved=resolved, target=target)
    record = {
        "benchmark": "kernels",
        "model": shape.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "settings": changed_settings(resolved),
        **environment,
        "ceilings": asdict(target.ceilings),
        **{kind: [line.as_dict() for line in lines] for kind, lines in found.items()},
    }
    write_json(args.json, record)
    return 0


def _check_only(args: argparse.Namespace) -> None:
    """Refuse flags of what ``--only`` leaves out.

    Raises:
        SettingsError: names the flag.
    """
    if args.only in ("ops", "moe"):
        for flag in ("cases", "backends"):
            if getattr(args, flag):
                raise SettingsError(
                    f"--{flag} is about attention; leave it out, or --only {args.only}"
                )
    if args.only == "attention" and args.rows:
        raise SettingsError(
            "--rows is about operations and experts, the rows of attention are those of --cases; "
            "leave it or --only attention out, or take the grid of --attention"
        )


def _attention_cases(
    args: argparse.Namespace,
    settings: Settings,
    host: "PluginHost",
    device: "torch.device",
    dtype: "torch.dtype",
) -> "list[AttentionCase]":
    """Return the cases of attention to measure, if any, all of which the KV pool can hold."""
    from minisgl.benchmark.attention_cases import default_cases, parse_case
    from minisgl.benchmark.attention_rig import check_pool

    if args.only not in (None, "attention"):
        return []
    cases = [parse_case(text) for text in args.cases or default_cases(device)]
    check_pool(cases, host, settings, device, dtype)
    return cases


def _ops(
    args: argparse.Namespace, shape: "ModelShape", host: "PluginHost", target: "Target"
) -> "list[Measured]":
    from minisgl.benchmark.kernels import bench_ops
    from minisgl.benchmark.op_cases import op_cases

    print(f"operations at the shapes of {shape.name}, rows after the colon")
    cases = op_cases(shape, args.rows or _OP_ROWS, target.device, target.dtype)
    query = shape.query(target.device, target.dtype)
    return _printed(bench_ops(cases, host, query, target))


def _experts(
    args: argparse.Namespace, reference: str, host: "PluginHost", resolved: ResolvedSettings
) -> "MoeShape | None":
    """Return the experts to measure, if any."""
    from minisgl.benchmark.moe_cases import moe_shape
    from minisgl.bootstrap.experts import weights_dtype_of

    _moe_backend(resolved.settings, host)  # a typo must show, and before anything is measured
    if args.only not in (None, "moe"):
        weights_dtype_of(resolved.settings, f"--only {args.only} measures none")
        return None
    experts = moe_shape(reference, host)
    if experts is None and args.only == "moe":
        raise SettingsError(
            f"--only moe: {reference} has no routed experts that an installed plugin runs; name a "
            "model that has, such as --model Qwen3-30B-A3B"
        )
    lack = f"{reference} has none that an installed plugin runs" if experts is None else None
    weights_dtype_of(resolved.settings, lack)
    return experts


def _moe_backend(settings: Settings, host: "PluginHost") -> str | None:
    """Return the qualified name of the one MoE backend that is measured; ``None``: all.

    Raises:
        UnknownBackendError: nobody offers it.
    """
    from minisgl.plugins.selection import AUTO

    name = settings.moe.backend
    return None if name == AUTO else host.moe.get(name).qualified


def _moe(
    args: argparse.Namespace,
    shape: "ModelShape",
    experts: "MoeShape",
    host: "PluginHost",
    *,
    resolved: ResolvedSettings,
    target: "Target",
) -> "list[Measured]":
    from minisgl.benchmark.kernels import bench_moe
    from minisgl.benchmark.moe_cases import MOE_TOKENS
    from minisgl.bootstrap.experts import weights_dtype_of

    print(f"routed experts at the shapes of {shape.name}, tokens after the colon")
    query = replace(
        shape.query(target.device, target.dtype),
        num_experts=experts.num_experts,
        moe_weights_dtype=weights_dtype_of(resolved.settings),
    )
    options = resolved.settings.backend_options
    tokens = args.rows or MOE_TOKENS
    only = _moe_backend(resolved.settings, host)
    lines = bench_moe(experts, tokens, host, query, options=options, target=target, only=only)
    return _printed(_while_memory_lasts(lines))


def _while_memory_lasts(lines: "Iterable[Measured]") -> "Iterator[Measured]":
    """Yield lines of experts until those of a number of tokens do not fit, and then that."""
    from minisgl.benchmark.kernels import Measured
    from minisgl.bootstrap.memory import is_out_of_memory

    try:
        yield from lines
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = "the next tokens of --rows, or the experts, need more memory than there is"
        yield Measured(case="moe", implementation="-", reason=reason)


def _printed(lines: "Iterable[Measured]") -> "list[Measured]":
    """Print each line as it comes, and return them all."""
    found = []
    for line in lines:
        found.append(line)
        _print(line)
    return found


def _load(settings: Settings) -> "tuple[PluginHost, torch.device, torch.dtype]":
    """Return the plugins, whose options are checked, and what is to be measured on."""
    import torch

    from minisgl.bootstrap import load_host, resolve_device, resolve_dtype
    from minisgl.plugins.options import validate_backend_options

    device = resolve_device(settings.engine.device)
    dtype = resolve_dtype(settings.model.dtype, "bfloat16", device)
    if settings.engine.num_threads is not None:
        torch.set_num_threads(settings.engine.num_threads)
    host = load_host(settings)
    validate_backend_options(host, settings.backend_options)
    return host, device, dtype


def _measure(
    args: argparse.Namespace, settings: Settings, device: "torch.device", dtype: "torch.dtype"
) -> "tuple[Target, dict[str, Any]]":
    """Return the device with its ceilings, and the facts about it; prints them."""
    from minisgl.benchmark.environment import describe_environment
    from minisgl.benchmark.timing import SHORTEST_S, Target, measure_ceilings

    environment = describe_environment(args.command_line, args.commit, settings.engine.device)
    scale = _QUICK if args.quick else 1.0
    # A GPU has them in a second; from small inputs they would come out far too low.
    ceilings = measure_ceilings(device, dtype, size=scale if device.type == "cpu" else 1.0)
    print(
        f"{environment['device']['name']}: reads {ceilings.read_bytes_per_s / 1e9:.0f} GB/s (a "
        f"reduction), {ceilings.flops_per_s / 1e12:.2f} TFLOP/s (a matrix product in "
        f"{str(dtype)[6:]})"
    )
    target = Target(device=device, dtype=dtype, ceilings=ceilings, shortest_s=SHORTEST_S * scale)
    return target, environment


def _print(line: "Measured") -> None:
    title = f"{line.case:<36}{line.implementation:<16}"
    if line.us is None or line.rate is None or line.fraction is None:
        print(f"{title}{'-':>10}  {line.reason}", flush=True)
        return
    moved = f"{line.rate / 1e9:.1f}" if line.kind == "bytes" else ""
    computed = f"{line.rate / 1e12:.3f}" if line.kind == "flops" else ""
    print(
        f"{title}{line.us:>10.1f}{moved:>9}{computed:>9}{line.fraction:>9.0%}  {line.clock}",
        flush=True,
    )
