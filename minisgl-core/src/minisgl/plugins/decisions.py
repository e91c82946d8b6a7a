"""The decision table: each candidate's rank, or the reason against it."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

AnyPhase = Literal["prefill", "decode", "any"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One row of the decision table.

    Attributes:
        kind: what was chosen: ``model``, ``attention``, ``moe``, ``cache.pool``, ``op NAME``.
        name, distribution: of the candidate.
        phase: of a launch that it was considered for; ``any`` where phases do not matter.
        outcome: ``chosen``, ``usable`` (something else was chosen) or ``refused``.
        rank: the higher one wins; ``None`` if refused.
        reason: why refused, or why not chosen although usable; empty otherwise.
        source: where the rank comes from; empty: nobody says.
        measured: whether ``attention.measurements`` gave the rank: it goes before all others.
    """

    kind: str
    name: str
    distribution: str
    phase: AnyPhase
    outcome: Literal["chosen", "usable", "refused"]
    rank: int | None
    reason: str
    source: str = ""
    measured: bool = False


def log_decisions(decisions: Iterable[Decision]) -> None:
    """Log a decision table, as one message at INFO."""
    rows = list(decisions)
    if rows:
        logger.info("backends:\n%s", format_decisions(rows))


def format_decisions(decisions: Iterable[Decision]) -> str:
    """Return a decision table as aligned text, then where ranks come from."""
    decisions = list(decisions)
    lines = [("what", "phase", "backend", "from", "outcome", "rank", "reason")]
    lines += [
        (
            row.kind,
            row.phase,
            row.name,
            row.distribution,
            row.outcome,
            "-" if row.rank is None else str(row.rank),
            row.reason,
        )
        for row in decisions
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join(texts + _sources(decisions))


def _sources(decisions: Iterable[Decision]) -> list[str]:
    """Return a line for each source of ranks, with the backends and ranks that it gives."""
    ranks: dict[str, list[str]] = {}
    for row in decisions:
        if row.source:
            shown = "none" if row.rank is None else str(row.rank)
            ranks.setdefault(row.source, []).append(f"{row.name} ({row.phase}) {shown}")
    return [f"  rank of {', '.join(names)}: {source}" for source, names in ranks.items()]
