"""The tables of ``minisgl bench kernels --attention``: a line a case, a column a backend."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from minisgl.benchmark.attention_cells import Cell

_WIDTH: Final = 18


def format_head(backends: Sequence[str], refused: Mapping[str, str], num_cases: int) -> str:
    """Say what is measured, and which installed backends are not."""
    lines = [f"{num_cases} cases on {', '.join(_short(one) for one in backends) or 'no backend'}"]
    lines += [f"{_short(name)} cannot run here: {reason}" for name, reason in refused.items()]
    return "\n".join(lines)


def format_group(cells: "Sequence[Cell]", backends: Sequence[str]) -> str:
    """Return the table of some cases of one phase; ``*`` marks the fastest backend of a line."""
    first = cells[0].case
    unit = "TB/s" if first.phase == "decode" else "TFLOP/s"
    cases = list(dict.fromkeys(str(cell.case) for cell in cells))
    found = {(str(cell.case), cell.backend): cell for cell in cells}
    width = max(len(one) for one in (*cases, "case"))
    lines = [
        f"\n{first.phase}: {unit} and the share of what the device can",
        f"{'case':<{width}}" + "".join(f"{_short(one):>{_WIDTH}}" for one in backends),
    ]
    for case in cases:
        row = [found.get((case, backend)) for backend in backends]
        right = [cell.us for cell in row if cell and cell.status == "ok" and cell.us is not None]
        best = min(right, default=None)
        texts = (_cell(cell, best) for cell in row)
        lines.append(f"{case:<{width}}" + "".join(f"{text:>{_WIDTH}}" for text in texts))
    return "\n".join(lines)


def format_reasons(cells: "Sequence[Cell]", backends: Sequence[str]) -> str:
    """Return why cells have no figure: a line for each reason, with whom and where it concerns."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell in cells:
        if cell.status != "ok":
            concerned = found.setdefault((_shown(cell.status), cell.reason), {})
            concerned.setdefault(cell.name, []).append(str(cell.case))
    lines = [""] if found else []
    for (status, reason), concerned in found.items():
        names = "all" if len(concerned) == len(backends) > 1 else ", ".join(concerned)
        cases = list(dict.fromkeys(case for of_one in concerned.values() for case in of_one))
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        lines.append(f"{names}: {status}: {reason} ({cases[0]}{more})")
    return "\n".join(lines)


def _cell(cell: "Cell | None", best: float | None) -> str:
    """Return the text of one backend; none has run a case that somebody took out of the file."""
    if cell is None:
        return "-"
    if cell.rate is None or cell.fraction is None:
        return _shown(cell.status)
    rate = cell.rate / 1e12
    precise = f"{rate:.0f}" if rate >= 10 else f"{rate:.2f}" if rate >= 0.1 else f"{rate:.2g}"
    text = (
        f"{'*' if cell.status == 'ok' and cell.us == best else ''}{precise} {cell.fraction:>4.0%}"
    )
    return text if cell.status == "ok" else f"WRONG {text}"


def _shown(status: str) -> str:
    return "WRONG" if status == "wrong" else status


def _short(name: str) -> str:
    return name.rpartition(":")[2]
