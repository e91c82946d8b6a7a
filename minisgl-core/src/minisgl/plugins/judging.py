"""The rank of an offer, or the reason against it, and the best of several."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minisgl.plugins.capabilities import unmet_requirement, unmet_weights_dtype
from minisgl.plugins.decisions import AnyPhase, Decision
from minisgl.plugins.measurements import Measurements
from minisgl.plugins.records import BackendQuery, MoeBackendRecord, Phase, Supported
from minisgl.plugins.registry import Offer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rank, or ``None`` and the reason against it; see ``Decision`` for the rest."""

    rank: int | None
    reason: str
    source: str = ""
    measured: bool = False


def mark_best(rows: Sequence[Decision]) -> list[Decision]:
    """Mark the first row of the best rank as chosen; a tie is logged."""
    ranks = [(row.measured, row.rank) for row in rows if row.rank is not None]
    best = [row for row in rows if ranks and (row.measured, row.rank) == max(ranks)]
    if not best:
        return list(rows)
    winner = best[0]
    if len(best) > 1:
        names = " and ".join(row.name for row in best)
        logger.info(
            "%s (%s): %s share rank %s; %s comes first", winner.kind, winner.phase, names,
            winner.rank, winner.name,
        )  # fmt: skip
    return [_against(row, winner) for row in rows]


def _against(row: Decision, winner: Decision) -> Decision:
    if row is winner:
        return replace(row, outcome="chosen")
    if row.outcome == "usable":
        return replace(row, reason=f"{winner.name} has rank {winner.rank}")
    return row


def judge(
    offer: Offer[Any], query: BackendQuery, phase: AnyPhase, measured: Measurements | None = None
) -> Verdict:
    """Return the rank of an offer for a phase, or ``None`` and the reason against it."""
    capabilities = getattr(offer.record, "capabilities", None)
    unmet = unmet_requirement(capabilities, query, phase) if capabilities is not None else None
    if unmet is None and isinstance(offer.record, MoeBackendRecord):
        unmet = unmet_weights_dtype(offer.record, query)
    if unmet is not None:
        return Verdict(None, unmet)
    try:
        answer = offer.record.probe(query)
    except Exception as error:
        logger.debug("the probe of %s failed", offer.qualified, exc_info=error)
        return Verdict(None, f"its probe raised {type(error).__name__}: {error}")
    if not isinstance(answer, Supported):
        reason = getattr(answer, "reason", None)
        return Verdict(None, str(reason or f"its probe returned {answer!r}"))
    ranks: Mapping[Phase, int | None] = {
        "prefill": answer.prefill_rank,
        "decode": answer.decode_rank,
    }
    wanted = [rank for of, rank in ranks.items() if phase in ("any", of) and rank is not None]
    if not wanted:
        reason = "it serves no phase here" if phase == "any" else f"it does not serve {phase}"
        return Verdict(None, reason)
    verdict = Verdict(max(wanted), "", answer.source)
    if measured is None or phase == "any":
        return verdict
    found = measured.judge(offer.qualified, query, phase)
    if found is None:
        known = f"; {verdict.source}" if verdict.source else ""
        return replace(verdict, source=f"{measured.not_measured(query, phase)}{known}")
    return Verdict(found.rank, found.reason, found.source, measured=True)
