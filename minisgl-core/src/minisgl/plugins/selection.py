"""Chooses backends: the one that the user names, or the best one that can run here.

Every candidate's rank, or the reason against it, ends up in a table of ``Decision`` rows.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from minisgl.errors import UnsupportedBackendError
from minisgl.plugins.capabilities import unmet_requirement
from minisgl.plugins.decisions import AnyPhase, Decision
from minisgl.plugins.failure import describe_error
from minisgl.plugins.host import PluginHost
from minisgl.plugins.options import Options, settings_of, validate_backend_options
from minisgl.plugins.pairs import check_pair
from minisgl.plugins.records import (
    AttentionBackendRecord,
    BackendQuery,
    KVPoolRecord,
    MoeBackendRecord,
    OpRecord,
    Phase,
    PrefixCacheRecord,
    Supported,
)
from minisgl.plugins.registry import Offer, Registry

if TYPE_CHECKING:
    from minisgl.kernel.ops import OpTable

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT")
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Selection(Generic[RecordT]):
    """A chosen record, its validated settings, who offers it, and how it was chosen."""

    record: RecordT
    settings: Any
    distribution: str
    choice: str
    table: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class OtherBackend:
    """An attention backend that was not chosen, with its qualified name."""

    name: str
    record: AttentionBackendRecord[Any]
    settings: Any


@dataclass(frozen=True, slots=True)
class AttentionSelection:
    """One attention backend for each phase; often the same one twice.

    Attributes:
        prefill, decode: the chosen records.
        prefill_settings, decode_settings: their validated settings.
        choice: the qualified names, which mean the same in a worker process.
        table: how they were chosen.
        others: that could decode as well, if nobody was named: an engine may measure them. Not the
            reference.
    """

    prefill: AttentionBackendRecord[Any]
    decode: AttentionBackendRecord[Any]
    prefill_settings: Any
    decode_settings: Any
    choice: str
    table: tuple[Decision, ...]
    others: tuple[OtherBackend, ...] = ()


def select_attention(
    host: PluginHost,
    query: BackendQuery,
    choice: str = AUTO,
    backend_options: Options | None = None,
) -> AttentionSelection:
    """Choose the attention backends of prefill and decode.

    Args:
        host: the loaded plugins.
        query: what they must run on.
        choice: ``auto``, a name for both phases, or ``PREFILL,DECODE``.
        backend_options: settings of backends, by name.

    Raises:
        UnknownBackendError, AmbiguousBackendError: the choice names none, or several.
        UnsupportedBackendError: the chosen one, or with ``auto`` every one, cannot run here; or two
            that are named cannot read one KV pool.
        SettingsError: ``backend_options`` are wrong.
    """
    options = backend_options or {}
    validate_backend_options(host, options)
    for_prefill, comma, for_decode = choice.partition(",")
    if comma and AUTO not in {for_prefill, for_decode}:
        check_pair(host.attention, query, for_prefill, for_decode)
    prefill, before = _choose(host.attention, "attention", query, for_prefill, "prefill")
    wanted = for_decode if comma else for_prefill
    decode, after = _choose(host.attention, "attention", query, wanted, "decode")
    others = []
    if wanted == AUTO:
        usable = [row for row in after if row.outcome == "usable" and row.rank]
        offers = [host.attention.get(f"{row.distribution}:{row.name}") for row in usable]
        others = [
            OtherBackend(one.qualified, one.record, settings_of(host, one, options))
            for one in offers
        ]
    return AttentionSelection(
        prefill=prefill.record,
        decode=decode.record,
        prefill_settings=settings_of(host, prefill, options),
        decode_settings=settings_of(host, decode, options),
        choice=f"{prefill.qualified},{decode.qualified}",
        table=(*before, *after),
        others=tuple(others),
    )


def attention_record(
    host: PluginHost,
    query: BackendQuery,
    name: str,
    phase: Phase,
    backend_options: Options | None = None,
) -> tuple[AttentionBackendRecord[Any], Any]:
    """Return the record of that name and its settings, for one phase, whatever serves the other.

    Raises:
        UnknownBackendError, AmbiguousBackendError: the name means none, or several.
        UnsupportedBackendError: it cannot run here.
        SettingsError: ``backend_options`` are wrong.
    """
    offer, _ = _choose(host.attention, "attention", query, name, phase)
    return offer.record, settings_of(host, offer, backend_options or {})


def select_moe(
    host: PluginHost,
    query: BackendQuery,
    choice: str = AUTO,
    backend_options: Options | None = None,
) -> Selection[MoeBackendRecord[Any]]:
    """Choose the MoE backend; arguments and errors as for ``select_attention``."""
    return _select(host, host.moe, "moe", query=query, choice=choice, options=backend_options or {})


def select_kv_pool(
    host: PluginHost,
    query: BackendQuery,
    choice: str = AUTO,
    backend_options: Options | None = None,
) -> Selection[KVPoolRecord[Any]]:
    """Choose the KV pool; arguments and errors as for ``select_attention``."""
    return _select(
        host, host.kv_pools, "cache.pool", query=query, choice=choice, options=backend_options or {}
    )


def select_prefix_cache(
    host: PluginHost, choice: str, backend_options: Options | None = None
) -> Selection[PrefixCacheRecord[Any]]:
    """Return the prefix cache of that name; it runs anywhere.

    Raises:
        UnknownBackendError, AmbiguousBackendError: the choice names none, or several.
        SettingsError: ``backend_options`` are wrong.
    """
    options = backend_options or {}
    validate_backend_options(host, options)
    offer = host.prefix_caches.get(choice)
    row = Decision("cache.prefix", offer.name, offer.distribution, "any", "chosen", None, "")
    settings = settings_of(host, offer, options)
    return Selection(offer.record, settings, offer.distribution, offer.qualified, (row,))


def select_ops(host: PluginHost, query: BackendQuery) -> "OpTable":
    """Return the op table: of each operation the implementation with the best rank.

    Core's torch reference has rank 0 and stays unless something is ranked higher.

    Raises:
        UnsupportedBackendError: the best implementation cannot be loaded.
    """
    from minisgl.kernel.ops import OpTable, build_table

    names = [entry.name for entry in fields(OpTable)]
    chosen: dict[str, Any] = {}
    for offer in best_ops(explain_ops(host, query, names), host):
        try:
            chosen[offer.record.op] = offer.record.load()
        except Exception as error:
            raise UnsupportedBackendError(
                f"op {offer.record.op!r}: {offer.record.name!r} of {offer} was chosen and cannot be"
                f" loaded: {describe_error(error)}. Without it: --disable-plugin"
                f" {offer.distribution}."
            ) from error
    return build_table(chosen)


def best_ops(table: Iterable[Decision], host: PluginHost) -> list[Offer[OpRecord]]:
    """Return the offers that a table of ``explain_ops`` chose; the reference is none of them."""
    chosen = {(row.kind, row.name, row.distribution) for row in table if row.outcome == "chosen"}
    return [
        offer
        for offer in host.ops
        if (f"op {offer.record.op}", offer.record.name, offer.distribution) in chosen
    ]


def explain_ops(
    host: PluginHost, query: BackendQuery, names: Sequence[str]
) -> tuple[Decision, ...]:
    """Return the decisions on every operation of ``names``, and on offers for unknown ones."""
    table: list[Decision] = []
    for op in names:
        offers = [offer for offer in host.ops if offer.record.op == op]
        rows = _rows(
            offers,
            host.ops,
            kind=f"op {op}",
            query=query,
            phase="any",
            name_of=lambda o: o.record.name,
        )
        reference = Decision(f"op {op}", "reference", "minisgl-core", "any", "usable", 0, "")
        table += _mark_best([reference, *rows])
    for offer in host.ops:
        if offer.record.op not in names:
            reason = f"no such op; known: {', '.join(names)}"
            name, owner = offer.record.name, offer.distribution
            kind = f"op {offer.record.op}"
            table.append(Decision(kind, name, owner, "any", "refused", None, reason))
    return tuple(table)


def explain_attention(host: PluginHost, query: BackendQuery) -> tuple[Decision, ...]:
    """Return what ``auto`` would decide, without settings, and without failing."""
    return (
        *_explain(host.attention, "attention", query, "prefill"),
        *_explain(host.attention, "attention", query, "decode"),
    )


def explain_moe(host: PluginHost, query: BackendQuery) -> tuple[Decision, ...]:
    """Return what ``auto`` would decide, without settings, and without failing."""
    return _explain(host.moe, "moe", query, "any")


def _select(
    host: PluginHost,
    registry: Registry[Any],
    kind: str,
    *,
    query: BackendQuery,
    choice: str,
    options: Options,
) -> Selection[Any]:
    validate_backend_options(host, options)
    offer, table = _choose(registry, kind, query, choice, "any")
    settings = settings_of(host, offer, options)
    return Selection(offer.record, settings, offer.distribution, offer.qualified, table)


def _choose(
    registry: Registry[Any], kind: str, query: BackendQuery, choice: str, phase: AnyPhase
) -> tuple[Offer[Any], tuple[Decision, ...]]:
    """Return the offer that ``choice`` means for a phase, and the rows about it."""
    label = registry.setting if phase == "any" else f"{registry.setting} ({phase})"
    if choice != AUTO:
        offer = registry.get(choice)
        rank, reason = _judge(offer, query, phase)
        if rank is None:
            usable = [
                row.name
                for row in _explain(registry, kind, query, phase)
                if row.outcome != "refused"
            ]
            raise UnsupportedBackendError(
                f"{label}={choice!r} cannot run here: {reason}."
                f" Usable: {', '.join(usable) or 'none'}."
            )
        row = Decision(kind, offer.name, offer.distribution, phase, "chosen", rank, "")
        return offer, (row,)
    table = _explain(registry, kind, query, phase)
    for row in table:
        if row.outcome == "chosen":
            return registry.get(f"{row.distribution}:{row.name}"), table
    reasons = "; ".join(f"{row.name}: {row.reason}" for row in table) or "none is installed"
    causes = "".join(f" {cause}." for cause in registry.left_out)
    raise UnsupportedBackendError(f"{label}='auto' finds nothing that can run: {reasons}.{causes}")


def _explain(
    registry: Registry[Any], kind: str, query: BackendQuery, phase: AnyPhase
) -> tuple[Decision, ...]:
    rows = _rows(
        list(registry), registry, kind=kind, query=query, phase=phase, name_of=lambda o: o.name
    )
    return tuple(_mark_best(rows))


def _rows(
    offers: Sequence[Offer[Any]],
    registry: Registry[Any],
    *,
    kind: str,
    query: BackendQuery,
    phase: AnyPhase,
    name_of: Callable[[Offer[Any]], str],
) -> list[Decision]:
    """Return a row for each offer, usable or refused, in the order of names."""
    ambiguous: Mapping[str, tuple[Offer[Any], ...]] = registry.ambiguous
    rows = []
    for offer in offers:
        rank: int | None = None
        if offer.name in ambiguous:
            owners = " and ".join(other.distribution for other in ambiguous[offer.name])
            reason = f"ambiguous: offered by {owners}"
        else:
            rank, reason = _judge(offer, query, phase)
        outcome: Literal["usable", "refused"] = "refused" if rank is None else "usable"
        name = name_of(offer)
        rows.append(Decision(kind, name, offer.distribution, phase, outcome, rank, reason))
    return rows


def _mark_best(rows: Sequence[Decision]) -> list[Decision]:
    """Mark the first row of the best rank as chosen; a tie is logged."""
    ranks = [row.rank for row in rows if row.rank is not None]
    best = [row for row in rows if row.rank is not None and row.rank == max(ranks)]
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


def _judge(offer: Offer[Any], query: BackendQuery, phase: AnyPhase) -> tuple[int | None, str]:
    """Return the rank of an offer for a phase, or ``None`` and the reason against it."""
    capabilities = getattr(offer.record, "capabilities", None)
    unmet = unmet_requirement(capabilities, query, phase) if capabilities is not None else None
    if unmet is not None:
        return None, unmet
    try:
        answer = offer.record.probe(query)
    except Exception as error:
        logger.debug("the probe of %s failed", offer.qualified, exc_info=error)
        return None, f"its probe raised {type(error).__name__}: {error}"
    if not isinstance(answer, Supported):
        reason = getattr(answer, "reason", None)
        return None, str(reason or f"its probe returned {answer!r}")
    ranks: Mapping[Phase, int | None] = {
        "prefill": answer.prefill_rank,
        "decode": answer.decode_rank,
    }
    wanted = [rank for of, rank in ranks.items() if phase in ("any", of) and rank is not None]
    if not wanted:
        return None, "it serves no phase here" if phase == "any" else f"it does not serve {phase}"
    return max(wanted), ""
