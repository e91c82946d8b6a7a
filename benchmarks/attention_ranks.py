"""Writes the ranks of our plugins' attention backends from a run of the grid on one H200.

``python benchmarks/attention_ranks.py`` reads ``results/attention-h200.json`` and rewrites
``measured_ranks.py`` of each distribution; a test compares them. What that run does not have keeps
the ranks that were set by hand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from minisgl.plugins.measurements import MeasuredCell, Measurements, read_measurements, scores
from minisgl.plugins.rank_table import Key

ROOT: Final = Path(__file__).parent.parent
FILE: Final = ROOT / "benchmarks" / "results" / "attention-h200.json"
CORE: Final = "minisgl-core"
REFERENCE: Final = "minisgl-core:torch"
"""Has rank 0 by definition."""

BASELINE: Final = "minisgl-core:triton"
"""Core's own kernels: what they beat in every case has rank 0, and no engine creates it."""

_PHASES: Final = ("prefill", "decode")

Tables = dict[str, dict[Key, int]]
"""Ranks of one backend, by phase."""

SOURCE_BY_HAND: Final = "by hand, from single figures on an NVIDIA H200"

BY_HAND: Final[Mapping[str, Tables]] = MappingProxyType(
    {
        "minisgl-core:triton": {"prefill": {(16, 2): 10}, "decode": {(16, 2): 10}},
        "minisgl-attn-flashinfer:flashinfer": {
            "prefill": {(16, 2): 100}, "decode": {(16, 2): 100},
        },
        "minisgl-attn-flashinfer:trtllm": {"decode": {(16, 2): 8}},
        "minisgl-attn-fa:fa": {
            "prefill": {(16, 2): 90, (64, 2): 90, (128, 2): 110}, "decode": {(16, 2): 0},
        },
    }
)  # fmt: skip
"""What holds where there is no run. All of our backends but the reference are here."""


def module_of(distribution: str) -> Path:
    """Return the file that holds the ranks of a distribution's backends."""
    if distribution == CORE:
        return ROOT / CORE / "src" / "minisgl" / "plugins" / "measured_ranks.py"
    package = distribution.replace("-", "_")
    return ROOT / distribution / "src" / package / "measured_ranks.py"


def rank_tables(found: Measurements) -> dict[str, Tables]:
    """Return the ranks of each backend that was measured, by its qualified name.

    Raises:
        ValueError: a backend was wrong or failed; or two shapes that were measured have one key.
    """
    tables: dict[str, Tables] = {}
    shapes: dict[tuple[str, Key], list[MeasuredCell]] = {}
    for cell in found.cells:
        if cell.status in ("wrong", "failed"):
            raise ValueError(f"{cell.backend} {cell.status} in {cell.case}: {cell.reason}")
        key = (cell.page_size, cell.num_q_heads // cell.num_kv_heads)
        shapes.setdefault((cell.phase, key), []).append(cell)
    for (phase, key), cells in sorted(shapes.items()):
        if len({cell.shape for cell in cells}) > 1:
            raise ValueError(f"several heads of {key[1]} query heads a KV head, page size {key[0]}")
        for backend, score in scores(cells).items():
            rank = 0 if _never_faster(cells, backend) else max(1, round(100 * score))
            tables.setdefault(backend, {}).setdefault(phase, {})[key] = rank
    tables.pop(REFERENCE, None)
    return tables


def _never_faster(cells: Sequence[MeasuredCell], backend: str) -> bool:
    """Return whether the baseline was faster in each case that both ran, and there are some."""
    times = {
        name: {one.case: one.us for one in cells if one.backend == name and one.status == "ok"}
        for name in (backend, BASELINE)
    }
    ours, theirs = times[backend], times[BASELINE]
    common = ours.keys() & theirs.keys()
    return bool(common) and all((theirs[case] or 0.0) < (ours[case] or 0.0) for case in common)


def render(tables: Mapping[str, tuple[str, Tables]], distribution: str) -> str:
    """Return the module with the ranks of one distribution's backends.

    Args:
        tables: source and ranks by the backend's name, without its distribution.
        distribution: whose module it is.
    """
    where = "minisgl.plugins.rank_table" if distribution == CORE else "minisgl.plugins"
    lines = [
        '"""Measured ranks of attention backends, written by ``benchmarks/attention_ranks.py``."""',
        "",
        "from collections.abc import Mapping",
        "from types import MappingProxyType",
        "from typing import Final",
        "",
        f"from {where} import RankTable",
        "",
        "RANKS: Final[Mapping[str, RankTable]] = MappingProxyType(",
        "    {",
    ]
    for name, (source, of_phases) in sorted(tables.items()):
        lines += [f'        "{name}": RankTable(', f'            source="{source}",']
        for phase in _PHASES:
            ranks = of_phases.get(phase, {})
            lines.append(f"            {phase}={{" if ranks else f"            {phase}={{}},")
            lines += [f"                {key}: {rank}," for key, rank in ranks.items()]
            lines += ["            },"] if ranks else []
        lines.append("        ),")
    return "\n".join([*lines, "    }", ")", ""])


def modules() -> dict[Path, str]:
    """Return what each module of ranks must be: from the run, and by hand where it has nothing."""
    measured: dict[str, Tables] = {}
    source = ""
    if FILE.is_file():
        found = read_measurements(FILE)
        measured = rank_tables(found)
        name = FILE.relative_to(ROOT).as_posix()
        source = f"measured on {found.device}, {name}, {found.date[:10]}"
    by_distribution: dict[str, dict[str, tuple[str, Tables]]] = {}
    for backend, by_hand in BY_HAND.items():
        distribution, _, name = backend.rpartition(":")
        tables = {**by_hand, **measured.get(backend, {})}
        left = [phase for phase in by_hand if phase not in measured.get(backend, {})]
        where = f"{source}; {' and '.join(left)} {SOURCE_BY_HAND}" if left else source
        if len(left) == len(by_hand):
            where = SOURCE_BY_HAND
        by_distribution.setdefault(distribution, {})[name] = (where, tables)
    return {
        module_of(distribution): render(tables, distribution)
        for distribution, tables in by_distribution.items()
    }


def main() -> None:
    """Write the modules of ranks."""
    for path, text in modules().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
