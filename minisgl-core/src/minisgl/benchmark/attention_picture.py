"""A heat map of a grid of attention cases: who is fastest where, and how near to the ceiling.

A line of panels for each phase and page size, a column for each head shape. In a panel decode has
rows down and contexts across, prefill its prompts down. Colour is the fastest backend's fraction
of the ceiling; the text names it, and says how much longer the second one takes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minisgl.benchmark.attention_cells import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL: Final = (4.4, 2.6)
_Place = tuple[str, str]


def draw(cells: Sequence[Cell], device: str, path: Path) -> None:
    """Write the picture of the cells of a grid to ``path``; its suffix is the format.

    Args:
        cells: of any parts; published cases are left out.
        device: its name, for the title.
        path: file to write.
    """
    from matplotlib.figure import Figure

    panels = _panels([cell for cell in cells if cell.part == "grid"])
    lines = list(dict.fromkeys(line for line, _ in panels))
    columns = list(dict.fromkeys(column for _, column in panels))
    size = (_PANEL[0] * max(1, len(columns)), _PANEL[1] * max(1, len(lines)))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(
        f"Attention on {device}: fraction of the ceiling, fastest backend, and how much longer the "
        "second takes",
        fontsize=9,
    )
    all_axes: Any = figure.subplots(max(1, len(lines)), max(1, len(columns)), squeeze=False)
    image = None
    for i, line in enumerate(lines):
        for j, column in enumerate(columns):
            axes: Any = all_axes[i, j]
            of_panel = panels.get((line, column))
            if of_panel is None:
                axes.set_axis_off()
                continue
            image = _draw_panel(axes, of_panel)
            axes.set_title(f"{line}, {column}", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=all_axes, shrink=0.6, label="fraction of the ceiling")
    figure.savefig(path, dpi=100)


def _panels(cells: Sequence[Cell]) -> Mapping[_Place, list[Cell]]:
    """Return the cells of each panel by its line (phase, page size) and column (heads)."""
    panels: dict[_Place, list[Cell]] = {}
    for cell in sorted(cells, key=lambda one: (one.case.phase, one.case.page_size)):
        case = cell.case
        heads = f"{case.num_q_heads}/{case.num_kv_heads}x{case.head_dim} heads"
        place = (f"{case.phase}, page size {case.page_size}", heads)
        panels.setdefault(place, []).append(cell)
    return panels


def _draw_panel(axes: "Axes", cells: Sequence[Cell]) -> Any:
    """Draw one panel; return its image, for the colour bar."""
    decode = cells[0].case.phase == "decode"
    at = {cell: _coordinates(cell) for cell in cells}
    downs = sorted({down for down, _ in at.values()})
    across = sorted({right for _, right in at.values()})
    values = np.full((len(downs), len(across)), np.nan)
    for i, down in enumerate(downs):
        for j, right in enumerate(across):
            here = [cell for cell in cells if at[cell] == (down, right)]
            ranked = sorted((c for c in here if c.status == "ok"), key=lambda one: one.us or 0.0)
            if ranked and ranked[0].fraction is not None:
                values[i, j] = ranked[0].fraction
            axes.text(
                j, i, _text(ranked, here), ha="center", va="center", fontsize=6,
                color="white" if values[i, j] < 0.6 else "black",
            )  # fmt: skip
    image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(across)), [name for _, name in across], fontsize=7)
    axes.set_yticks(range(len(downs)), [name for _, name in downs], fontsize=7)
    if decode:
        axes.set_xlabel("tokens of a row, on average", fontsize=7)
    axes.set_ylabel("rows" if decode else "prompts x tokens (+ cached)", fontsize=7)
    return image


def _coordinates(cell: Cell) -> tuple[tuple[int, str], tuple[int, str]]:
    """Return where a cell lies, down and across, each as a number to sort by and its label."""
    case = cell.case
    if case.phase == "prefill":
        return (case.flops(), str(case).split(":")[1]), (0, "")
    tokens = sum(case.lengths) // 2 + case.prefix
    return (case.num_rows, str(case.num_rows)), (tokens, str(tokens))


def _text(ranked: Sequence[Cell], here: Sequence[Cell]) -> str:
    """Name the fastest, and say how much longer the second one takes."""
    if not ranked:
        return "/".join(sorted({cell.status for cell in here}))
    first, *others = ranked
    lines = [first.name, f"{first.fraction:.0%}"]
    if others and others[0].us and first.us:
        lines.append(f"{others[0].name} +{others[0].us / first.us - 1:.0%}")
    return ("\n" if here[0].case.phase == "decode" else ", ").join(lines)
