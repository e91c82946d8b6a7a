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
    """

    kind: str
    name: str
    distribution: str
    phase: AnyPhase
    outcome: Literal["chosen", "usable", "refused"]
    rank: int | None
    reason: str


def log_decisions(decisions: Iterable[Decision]) -> None:
    """Log a decision table, as one message at INFO."""
    rows = list(decisions)
    if rows:
        logger.info("backends:\n%s", format_decisions(rows))


def format_decisions(decisions: Iterable[Decision]) -> str:
    """Return a decision table as aligned text."""
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
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
