"""Chooses the grammar engine: the one that the user names, or the best one that can run here."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.errors import UnsupportedBackendError
from minisgl.plugins.decisions import Decision
from minisgl.plugins.host import PluginHost
from minisgl.plugins.options import Options, settings_of, validate_backend_options
from minisgl.plugins.records import GrammarBackendRecord, Unsupported
from minisgl.plugins.registry import Offer

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class GrammarSelection:
    """What was chosen.

    Attributes:
        record: of the engine; ``None``: there is none.
        settings: its own, validated.
        off: why there is none, for those whose requests have a grammar.
        table: how it was chosen.
    """

    record: GrammarBackendRecord[Any] | None
    settings: Any
    off: str
    table: tuple[Decision, ...]


def select_grammar(
    host: PluginHost, choice: str = AUTO, backend_options: Options | None = None
) -> GrammarSelection:
    """Choose the grammar engine.

    Args:
        host: the loaded plugins.
        choice: ``auto``, ``none`` or a name. With ``auto`` a server starts without one, too.
        backend_options: settings of backends, by name.

    Raises:
        UnknownBackendError, AmbiguousBackendError: the choice names none, or several.
        UnsupportedBackendError: the one that is named cannot run here.
        SettingsError: ``backend_options`` are wrong.
    """
    options = backend_options or {}
    validate_backend_options(host, options)
    if choice == NONE:
        return GrammarSelection(None, None, "structured.backend is none", ())
    if choice != AUTO:
        offer = host.grammars.get(choice)
        rank, reason = _judge(offer)
        if rank is None:
            raise UnsupportedBackendError(
                f"structured.backend={choice!r} cannot run here: {reason}."
            )
        return _chosen(host, offer, options, (_row(offer, rank, ""),))
    ambiguous: Mapping[str, object] = host.grammars.ambiguous
    rows, best = [], None
    for offer in host.grammars:
        rank, reason = None, f"several distributions offer {offer.name!r}"
        if offer.name not in ambiguous:
            rank, reason = _judge(offer)
        rows.append(_row(offer, rank, reason))
        if rank is not None and (best is None or rank > best[1]):
            best = offer, rank
    if best is not None:
        return _chosen(host, best[0], options, tuple(rows))
    reasons = "; ".join(f"{row.name} {row.reason}" for row in rows) or "none is installed"
    return GrammarSelection(None, None, f"no grammar engine can run here: {reasons}", tuple(rows))


def _chosen(
    host: PluginHost, offer: Offer[Any], options: Options, rows: tuple[Decision, ...]
) -> GrammarSelection:
    table = tuple(
        _row(offer, row.rank, "", chosen=True)
        if (row.name, row.distribution) == (offer.name, offer.distribution)
        else row
        for row in rows
    )
    return GrammarSelection(offer.record, settings_of(host, offer, options), "", table)


def _judge(offer: Offer[GrammarBackendRecord[Any]]) -> tuple[int | None, str]:
    """Return the rank of an engine, or ``None`` and the reason against it."""
    try:
        answer: object = offer.record.probe()
    except Exception as error:
        logger.debug("the probe of %s failed", offer.qualified, exc_info=error)
        return None, f"its probe raised {type(error).__name__}: {error}"
    if isinstance(answer, Unsupported):
        return None, answer.reason
    if type(answer) is not int:
        return None, f"its probe returned {answer!r}"
    return answer, ""


def _row(offer: Offer[Any], rank: int | None, reason: str, *, chosen: bool = False) -> Decision:
    outcome = "chosen" if chosen else "refused" if rank is None else "usable"
    return Decision("grammar", offer.name, offer.distribution, "any", outcome, rank, reason)  # type: ignore[arg-type]
