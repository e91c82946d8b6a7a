"""``minisgl bench kernels --attention``: every attention backend over a grid of cases."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl.cli.bench.attention_table import format_group, format_head, format_reasons
from minisgl.cli.bench.numbers import names, number, numbers, words
from minisgl.cli.bench.output import check_writable, write_cells
from minisgl.cli.flags import typed_settings
from minisgl.errors import SettingsError
from minisgl.plugins.measurements import FORMAT, read_file
from minisgl.settings import ResolvedSettings, Settings

if TYPE_CHECKING:
    import torch

    from minisgl.benchmark.attention_cases import AttentionCase
    from minisgl.benchmark.attention_cells import Cell, CellBench
    from minisgl.benchmark.attention_grid import Grid, Part
    from minisgl.benchmark.timing import Target
    from minisgl.plugins.host import PluginHost

_GRID_FLAGS: Final = (
    "phases", "contexts", "prompts", "page_sizes", "models", "read", "picture", "time_limit",
    "memory_gib",
)  # fmt: skip
_MEMORY_GIB: Final = 24.0
_MEMORY_SHARE: Final = 0.6
"""Of what is free: backends need some, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the grid."""
    group = parser.add_argument_group("grid of attention (--attention)")
    group.add_argument(
        "--attention", action="store_true",
        help="measure every attention backend over a grid of cases, and compare results with exact "
        "attention; --rows are then those of decode, and --cases replaces the grid",
    )  # fmt: skip
    group.add_argument(
        "--phases", type=names(("decode", "prefill")), metavar="PHASE,...", help="(default: both)"
    )
    group.add_argument(
        "--contexts", type=numbers, metavar="N,...",
        help="tokens of a decode row, on average: several rows have from half to one and a half "
        "times as many (default: 512,2048,8192,32768)",
    )  # fmt: skip
    group.add_argument(
        "--prompts", type=words, metavar="ROWSxN[+CACHED],...",
        help="prefill launches: prompts, tokens of each, and cached tokens before them, such as "
        "4x2048,1x512+8192",
    )  # fmt: skip
    group.add_argument(
        "--page-sizes", type=numbers, metavar="N,...", help="tokens a page (default: 16,64,128)"
    )
    group.add_argument(
        "--models", type=words, metavar="MODEL,...",
        help="whose heads: published names, or folders with a config.json (default: Qwen3-0.6B, "
        "Qwen3-14B, Qwen3-30B-A3B, Llama-3.1-8B)",
    )  # fmt: skip
    group.add_argument(
        "--time-limit", type=number, metavar="SECONDS",
        help="skip the cases that are not yet measured then",
    )  # fmt: skip
    group.add_argument(
        "--memory-gib", type=number, metavar="N",
        help=f"skip cases whose K and V take more (default: {_MEMORY_GIB:.0f}, and at most "
        f"{_MEMORY_SHARE:.0%}% of what is free)",
    )  # fmt: skip
    group.add_argument(
        "--read", type=Path, metavar="FILE",
        help="measure nothing: print the tables of what --json wrote, and draw its --picture",
    )  # fmt: skip
    group.add_argument(
        "--picture", type=Path, metavar="FILE.png",
        help="draw a heat map of the grid; needs minisgl-core[bench]",
    )  # fmt: skip


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together, before anything is measured.

    Raises:
        SettingsError: names them, or what the picture lacks.
    """
    check_writable("--picture", args.picture)
    if args.picture is not None:
        from minisgl.benchmark.pictures import check_picture

        check_picture("--picture", args.picture)
    given = [f"--{name.replace('_', '-')}" for name in _GRID_FLAGS if getattr(args, name)]
    if given and not args.attention:
        raise SettingsError(f"{given[0]} is about the grid of attention; add --attention")
    if args.attention and args.only is not None:
        raise SettingsError("--attention measures attention alone; leave --only out")
    others = [flag for flag in given if flag not in ("--read", "--picture")]
    measures = [
        flag
        for flag in ("backends", "cases", "rows", "json", "quick", "commit")
        if getattr(args, flag)
    ]
    if args.read is not None and (others or measures or typed_settings(args)):
        raise SettingsError("--read measures nothing; leave all but --picture out")
    if args.attention and "model.path" in typed_settings(args):
        raise SettingsError("--attention measures the heads of --models; leave --model out")
    shape = [flag for flag in others if flag not in ("--time-limit", "--memory-gib")]
    if args.cases and args.attention and (shape or args.rows):
        raise SettingsError(f"--cases replaces the grid; leave {(shape or ['--rows'])[0]} out")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is measured: cases, qualified names of backends, and why others are left out."""

    grid: "Grid"
    cases: "list[tuple[Part, AttentionCase]]"
    backends: list[str]
    refused: dict[str, str]


def choose(
    args: argparse.Namespace,
    settings: Settings,
    host: "PluginHost",
    device: "torch.device",
    dtype: "torch.dtype",
) -> Chosen:
    """Return what the flags ask for; measures nothing.

    Raises:
        SettingsError: a case, a model, a prompt or an option is none.
        UnknownBackendError: nobody offers a backend or a KV pool of that name.
        UnsupportedBackendError: the KV pool that is set cannot hold a case.
    """
    from minisgl.benchmark.attention_cases import parse_case
    from minisgl.benchmark.attention_cells import usable_backends
    from minisgl.benchmark.attention_rig import check_pool

    grid = make_grid(args, device)
    given: list[tuple[Part, AttentionCase]] = [
        ("grid", parse_case(text)) for text in args.cases or ()
    ]
    cases = given or grid.cases()
    shapes = [case for _, case in cases]
    if args.backends is not None:
        check_pool(shapes, host, settings, device, dtype)
        return Chosen(grid, cases, named_backends(args, host), {})
    return Chosen(grid, cases, *usable_backends(host, settings, shapes, device, dtype))


def named_backends(args: argparse.Namespace, host: "PluginHost") -> list[str]:
    """Return the qualified names of ``--backends``, each once; without the flag, of all.

    Raises:
        UnknownBackendError: nobody offers one.
    """
    if args.backends is None:
        return [offer.qualified for offer in host.attention]
    return list(dict.fromkeys(host.attention.get(name).qualified for name in args.backends))


def run_grid(
    args: argparse.Namespace,
    resolved: ResolvedSettings,
    host: "PluginHost",
    chosen: Chosen,
    *,
    target: "Target",
    environment: Mapping[str, Any],
) -> int:
    """Measure the grid, print a table for each group of cases as it is ready, and write all."""
    from minisgl.benchmark.attention_cells import SHORTEST_S, CellBench
    from minisgl.benchmark.environment import changed_settings

    began = time.monotonic()
    cases, backends, refused = chosen.cases, chosen.backends, chosen.refused
    target = replace(target, shortest_s=min(SHORTEST_S, target.shortest_s))
    print(format_head(backends, refused, len(cases)), flush=True)
    record = {
        "benchmark": "attention",
        "format": FORMAT,
        "dtype": str(target.dtype).removeprefix("torch."),
        "settings": changed_settings(resolved),
        **environment,
        "ceilings": asdict(target.ceilings),
        "models": {name: str(heads) for name, heads in chosen.grid.models.items()},
        "refused": refused,
    }
    bench = CellBench(
        host,
        resolved.settings,
        target,
        backends,
        memory_bytes=_memory_bytes(args.memory_gib, target),
        ends_at=began + (args.time_limit or float("inf")),
        all_ranks=args.backends is not None,
    )
    cells: list[Cell] = []
    for group in _groups(bench, cases, len(backends)):
        cells += group
        print(format_group(group, backends), flush=True)
        # After each table: a run that is stopped, or that a kernel never returns from, leaves it.
        record["seconds"] = round(time.monotonic() - began, 1)
        write_cells(args.json, record, [cell.as_dict() for cell in cells])
    print(format_reasons(cells, backends))
    print(f"\n{len(cells)} cells of {len(cases)} cases took {time.monotonic() - began:.0f} s")
    if args.picture is not None:
        from minisgl.benchmark.attention_picture import draw

        draw(cells, environment["device"]["name"], args.picture)
    return 0


def show_file(path: Path, picture: Path | None) -> int:
    """Print the tables of a run that was kept, and draw it.

    Raises:
        SettingsError: the file holds no such run.
    """
    from minisgl.benchmark.attention_cells import KeptRun, read_cells

    kept = read_file(path, "--read", KeptRun)
    try:
        cells = read_cells(kept.cells)
    except SettingsError as error:
        raise SettingsError(f"--read={str(path)!r} cannot be shown: {error}") from error
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    num_cases = len({str(cell.case) for cell in cells})
    print(f"{kept.device.name}, {kept.date[:10]}: {kept.command}")
    print(format_head(backends, kept.refused, num_cases))
    for _, group in groupby(cells, key=lambda cell: _group_of(cell.part, cell.case)):
        print(format_group(list(group), backends))
    print(format_reasons(cells, backends))
    if picture is not None:
        from minisgl.benchmark.attention_picture import draw

        draw(cells, kept.device.name, picture)
    return 0


def make_grid(args: argparse.Namespace, device: "torch.device") -> "Grid":
    """Return the device's grid, narrowed by flags.

    Raises:
        SettingsError: a model or a prompt is none.
    """
    from minisgl.benchmark.attention_grid import default_grid, heads_of, parse_prompts

    grid = default_grid(device)
    given: dict[str, Any] = {
        name: value
        for name in ("phases", "rows", "contexts", "page_sizes")
        if (value := getattr(args, name))
    }
    if args.prompts:
        given["prompts"] = tuple(map(parse_prompts, args.prompts))
    if args.models:
        given["models"] = heads_of(args.models)
    if given.keys() & {"rows", "contexts", "prompts", "models"}:
        given["published"] = False
    return replace(grid, **given)


def _groups(
    bench: "CellBench", cases: "Sequence[tuple[Part, AttentionCase]]", num_backends: int
) -> "Iterator[list[Cell]]":
    """Yield the cells of each table as soon as its last one is there."""
    from minisgl.models.progress import progress_bar

    group: list[Cell] = []
    total = len(cases) * num_backends
    with progress_bar(total=total, unit="cell", show=sys.stderr.isatty(), smoothing=0.05) as bar:
        for position, (part, case) in enumerate(cases, 1):
            bar.set_postfix_str(str(case))
            for cell in bench.measure(part, case):
                group.append(cell)
                bar.update()
            following = cases[position] if position < len(cases) else None
            if following is None or _group_of(*following) != _group_of(part, case):
                bar.clear()
                yield group
                group = []


def _group_of(part: "Part", case: "AttentionCase") -> tuple[object, ...]:
    """Return what the cases of one table share."""
    if part == "published":
        return (part, case.phase)
    return (part, case.phase, case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)


def _memory_bytes(gib: int | None, target: "Target") -> float:
    from minisgl.engine.memory_plan import measure

    if gib is not None:
        return gib * 2.0**30
    return min(_MEMORY_GIB * 2.0**30, _MEMORY_SHARE * measure(target.device).free)
