"""Writes the ranks of our plugins' attention backends from a run of the grid on one H200.

``python benchmarks/attention_ranks.py`` reads ``results/attention-h200.json`` and rewrites
``measured_ranks.py`` of each distribution; a test compares them. Without that file, ranks are as
they were set by hand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
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


def module_of(distribution: str) -> Path:
    """Return the file that holds the ranks of a distribution's backends."""
    if distribution == CORE:
        return ROOT / CORE / "src" / "minisgl" / "plugins" / "measured_ranks.py"
    package = distribution.replace("-", "_")
    return ROOT / distribution / "src" / package / "measured_ranks.py"


def rank_tables(found: Measurements) -> dict[str, Tables]:
    """Return the ranks of each backend by its qualified name.

    Raises:
        ValueError: two shapes that were measured have the same key.
    """
    tables: dict[str, Tables] = {}
    shapes: dict[tuple[str, Key], list[MeasuredCell]] = {}
    for cell in found.cells:
        key = (cell.page_size, cell.num_q_heads // cell.num_kv_heads)
        shapes.setdefault((cell.phase, key), []).append(cell)
    for (phase, key), cells in sorted(shapes.items()):
        if len({cell.shape for cell in cells}) > 1:
            raise ValueError(f"{FILE.name}: several heads of {key[1]} query heads a KV head")
        for backend, score in scores(cells).items():
            if backend != REFERENCE:
                by_phase = tables.setdefault(backend, {name: {} for name in _PHASES})
                rank = max(1, round(100 * score))
                by_phase[phase][key] = 0 if _never_faster(cells, backend) else rank
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


def render(names: Mapping[str, Tables], source: str, distribution: str) -> str:
    """Return the module with the ranks of one distribution's backends.

    Args:
        names: tables by the backend's name, without its distribution.
        source: where they come from.
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
        f'SOURCE: Final = "{source}"',
        "",
        "RANKS: Final[Mapping[str, RankTable]] = MappingProxyType(",
        "    {",
    ]
    for name, tables in sorted(names.items()):
        lines += [f'        "{name}": RankTable(', "            source=SOURCE,"]
        for phase in _PHASES:
            lines.append(f"            {phase}={{")
            lines += [f"                {key}: {rank}," for key, rank in tables[phase].items()]
            lines.append("            },")
        lines.append("        ),")
    return "\n".join([*lines, "    }", ")", ""])


def modules() -> dict[Path, str]:
    """Return what each module of ranks must be, from the run; nothing without one."""
    if not FILE.is_file():
        return {}
    found = read_measurements(FILE)
    by_distribution: dict[str, dict[str, Tables]] = {}
    for backend, tables in rank_tables(found).items():
        distribution, _, name = backend.rpartition(":")
        by_distribution.setdefault(distribution, {})[name] = tables
    name = FILE.relative_to(ROOT).as_posix()
    source = f"measured on {found.device}, {name}, {found.date[:10]}"
    return {
        module_of(distribution): render(names, source, distribution)
        for distribution, names in by_distribution.items()
    }


def main() -> None:
    """Write the modules of ranks."""
    for path, text in modules().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
