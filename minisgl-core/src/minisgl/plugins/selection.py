"""Chooses backends: the one that the user names, or the best one that can run here.

Every candidate's rank, or the reason against it, ends up in a table of ``Decision`` rows.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from minisgl.errors import UnsupportedBackendError
from minisgl.plugins.decisions import AnyPhase, Decision
from minisgl.plugins.failure import describe_error
from minisgl.plugins.host import PluginHost
from minisgl.plugins.judging import Verdict, judge, mark_best
from minisgl.plugins.measurements import Measurements
from minisgl.plugins.options import Options, settings_of, validate_backend_options
from minisgl.plugins.pairs import check_pair
from minisgl.plugins.records import (
    AttentionBackendRecord,
    BackendQuery,
    ExpertExchangeRecord,
    KVPoolRecord,
    MoeBackendRecord,
    OpRecord,
    Phase,
    PrefixCacheRecord,
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
    measured: Measurements | None = None,
) -> AttentionSelection:
    """Choose the attention backends of prefill and decode.

    Args:
        host: the loaded plugins.
        query: what they must run on.
        choice: ``auto``, a name for both phases, or ``PREFILL,DECODE``.
        backend_options: settings of backends, by name.
        measured: on this device: ``auto`` ranks by it.

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
    prefill, before = _choose(
        host.attention, "attention", query, for_prefill, "prefill", measured=measured
    )
    wanted = for_decode if comma else for_prefill
    decode, after = _choose(host.attention, "attention", query, wanted, "decode", measured=measured)
    others = []
    if wanted == AUTO:
        usable = [row for row in after if row.outcome == "usable" and row.rank]
        offers = [host.attention.get(f"{row.distribution}:{row.name}") for row in usable]
        others = [
            OtherBackend(one.qualified, one.record, settings_of(host, one, options))
            for one in offers
            if measured is None or measured.worth_a_try(one.qualified, decode.qualified, query)
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


def select_exchange(
    host: PluginHost,
    query: BackendQuery,
    choice: str = AUTO,
    backend_options: Options | None = None,
) -> Selection[ExpertExchangeRecord[Any]]:
    """Choose the exchange of experts; arguments and errors as for ``select_attention``."""
    return _select(
        host, host.exchanges, "moe.exchange", query=query, choice=choice,
        options=backend_options or {},
    )  # fmt: skip


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
        table += mark_best([reference, *rows])
    for offer in host.ops:
        if offer.record.op not in names:
            reason = f"no such op; known: {', '.join(names)}"
            name, owner = offer.record.name, offer.distribution
            kind = f"op {offer.record.op}"
            table.append(Decision(kind, name, owner, "any", "refused", None, reason))
    return tuple(table)


def explain_attention(
    host: PluginHost, query: BackendQuery, measured: Measurements | None = None
) -> tuple[Decision, ...]:
    """Return what ``auto`` would decide, without settings, and without failing."""
    return (
        *_explain(host.attention, "attention", query, "prefill", measured),
        *_explain(host.attention, "attention", query, "decode", measured),
    )


def explain_moe(host: PluginHost, query: BackendQuery) -> tuple[Decision, ...]:
    """Return what ``auto`` would decide, without settings, and without failing.

    Exchanges are among it if experts are spread over ranks.
    """
    table = _explain(host.moe, "moe", query, "any")
    if query.expert_parallel_size == 1:
        return table
    return (*table, *_explain(host.exchanges, "moe.exchange", query, "any"))


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
    registry: Registry[Any],
    kind: str,
    query: BackendQuery,
    choice: str,
    phase: AnyPhase,
    *,
    measured: Measurements | None = None,
) -> tuple[Offer[Any], tuple[Decision, ...]]:
    """Return the offer that ``choice`` means for a phase, and the rows about it."""
    label = registry.setting if phase == "any" else f"{registry.setting} ({phase})"
    if choice != AUTO:
        offer = registry.get(choice)
        verdict = judge(offer, query, phase)
        if verdict.rank is None:
            usable = [
                row.name
                for row in _explain(registry, kind, query, phase)
                if row.outcome != "refused"
            ]
            raise UnsupportedBackendError(
                f"{label}={choice!r} cannot run here: {verdict.reason}."
                f" Usable: {', '.join(usable) or 'none'}.{_for_other_phase(offer, registry, phase)}"
            )
        doubt = verdict if measured is None else judge(offer, query, phase, measured)
        if doubt.rank is None:
            logger.warning("%s=%r runs because it was named, but %s", label, choice, doubt.reason)
        row = Decision(
            kind, offer.name, offer.distribution, phase, "chosen", verdict.rank, doubt.reason,
            verdict.source,
        )  # fmt: skip
        return offer, (row,)
    table = _explain(registry, kind, query, phase, measured)
    for row in table:
        if row.outcome == "chosen":
            return registry.get(f"{row.distribution}:{row.name}"), table
    reasons = "; ".join(f"{row.name}: {row.reason}" for row in table) or "none is installed"
    causes = "".join(f" {cause}." for cause in registry.left_out)
    raise UnsupportedBackendError(f"{label}='auto' finds nothing that can run: {reasons}.{causes}")


def _for_other_phase(offer: Offer[Any], registry: Registry[Any], phase: AnyPhase) -> str:
    """Say how to choose an offer that does not serve this phase at all for the other one."""
    pairs = {"prefill": f"{AUTO},{offer.name}", "decode": f"{offer.name},{AUTO}"}
    if phase == "any" or phase in offer.record.capabilities.phases:
        return ""
    (other,) = set(pairs) - {phase}
    return f" For {other} alone: {registry.setting}={pairs[phase]!r}."


def _explain(
    registry: Registry[Any],
    kind: str,
    query: BackendQuery,
    phase: AnyPhase,
    measured: Measurements | None = None,
) -> tuple[Decision, ...]:
    rows = _rows(
        list(registry), registry, kind=kind, query=query, phase=phase, name_of=lambda o: o.name,
        measured=measured,
    )  # fmt: skip
    return tuple(mark_best(rows))


def _rows(
    offers: Sequence[Offer[Any]],
    registry: Registry[Any],
    *,
    kind: str,
    query: BackendQuery,
    phase: AnyPhase,
    name_of: Callable[[Offer[Any]], str],
    measured: Measurements | None = None,
) -> list[Decision]:
    """Return a row for each offer, usable or refused, in the order of names."""
    ambiguous: Mapping[str, tuple[Offer[Any], ...]] = registry.ambiguous
    rows = []
    for offer in offers:
        if offer.name in ambiguous:
            owners = " and ".join(other.distribution for other in ambiguous[offer.name])
            verdict = Verdict(None, f"ambiguous: offered by {owners}")
        else:
            verdict = judge(offer, query, phase, measured)
        outcome: Literal["usable", "refused"] = "refused" if verdict.rank is None else "usable"
        rows.append(
            Decision(
                kind, name_of(offer), offer.distribution, phase, outcome, verdict.rank,
                verdict.reason, verdict.source, verdict.measured,
            )
        )  # fmt: skip
    return rows
