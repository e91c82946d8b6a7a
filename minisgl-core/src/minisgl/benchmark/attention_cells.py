"""Attention backends over many cases: a cell for each case and backend, whatever becomes of it."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import torch

from minisgl.benchmark.attention_cases import AttentionCase, parse_case
from minisgl.benchmark.attention_grid import Part
from minisgl.benchmark.attention_rig import AttentionRig, Run, count_layers, count_pages, pool_query
from minisgl.benchmark.timing import Target
from minisgl.errors import SettingsError
from minisgl.plugins.host import PluginHost
from minisgl.plugins.measurements import DeviceName
from minisgl.plugins.records import BackendQuery, Phase
from minisgl.plugins.selection import explain_attention
from minisgl.settings import Settings
from minisgl.testing.paged_rows import TOLERANCES

logger = logging.getLogger(__name__)

Status = Literal["ok", "wrong", "refused", "failed", "skipped"]

SHORTEST_S: Final = 0.002
"""Least seconds of one measurement of a cell: there are some fourteen hundred."""

_PUBLISHED_TIMES: Final = 5
"""So much longer are published cases measured, which are few."""


_NOT_TRIED: Final = "it has rank 0 here, so that no engine tries it; --backends measures it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One backend at one case.

    Attributes:
        part: of the run.
        case: what was run.
        backend: by whom, its qualified name.
        status: ``wrong``: it ran, and its output is not attention's; ``refused``: it says that it
            cannot run this; ``failed``: it raised an exception; ``skipped``: nobody ran this case.
        reason: of any status but ``ok``.
        times_us: microseconds of a layer, in each measurement.
        us: their median.
        rate: bytes of K and V (decode) or operations (prefill) a second.
        fraction: of what the device reaches.
        error: largest relative error of a compared token, by norm; ``None`` also if the output is
            not all numbers.
        clock: how it was timed, see ``Timing``.
        set_up_s: seconds of creating, planning and compiling.
    """

    part: Part
    case: AttentionCase
    backend: str
    status: Status
    reason: str = ""
    times_us: tuple[float, ...] = ()
    us: float | None = None
    rate: float | None = None
    fraction: float | None = None
    error: float | None = None
    clock: str = ""
    set_up_s: float | None = None

    @property
    def name(self) -> str:
        """Of the backend, without its distribution."""
        return self.backend.rpartition(":")[2]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        case = self.case
        return {
            "part": self.part,
            "case": str(case),
            "phase": case.phase,
            "rows": case.num_rows,
            "lengths": list(case.lengths),
            "prefix": case.prefix,
            "num_q_heads": case.num_q_heads,
            "num_kv_heads": case.num_kv_heads,
            "head_dim": case.head_dim,
            "page_size": case.page_size,
            "backend": self.backend,
            "status": self.status,
            "reason": self.reason,
            "us": self.us,
            "times_us": list(self.times_us),
            "rate": self.rate,
            "fraction": self.fraction,
            "error": self.error,
            "clock": self.clock,
            "set_up_s": self.set_up_s,
        }


class KeptCell(msgspec.Struct, frozen=True, kw_only=True):
    """A ``Cell`` as ``as_dict`` writes it, with what follows from its case left out."""

    part: Part
    case: str
    backend: str
    status: Status
    reason: str
    times_us: tuple[float, ...]
    us: float | None
    rate: float | None
    fraction: float | None
    error: float | None
    clock: str
    set_up_s: float | None


class KeptRun(msgspec.Struct, frozen=True, kw_only=True):
    """What tables and pictures show of a file that was kept."""

    date: str
    device: DeviceName
    command: str
    refused: dict[str, str]
    cells: tuple[KeptCell, ...]


def read_cells(kept: Sequence[KeptCell]) -> list[Cell]:
    """Return cells from what was kept of them.

    Raises:
        SettingsError: one has no case, or ran and has no figures.
    """
    found = []
    for one in kept:
        case = parse_case(one.case)
        if one.status == "ok" and None in (one.us, one.rate, one.fraction):
            raise SettingsError(f"{case} of {one.backend} ran, and has no us, rate or fraction")
        found.append(Cell(**{**msgspec.structs.asdict(one), "case": case}))
    return found


class CellBench:
    """Measures cells, case by case.

    Args:
        host: offers pools and backends.
        settings: which pool, and the options of backends.
        target: what is measured on.
        backends: qualified names, in the order of the table.
        memory_bytes: most bytes of a case's K and V, over all layers of its pool.
        ends_at: of ``time.monotonic``: what comes later is skipped.
        all_ranks: also what has rank 0 for a case, where anything else can run.
    """

    def __init__(
        self,
        host: PluginHost,
        settings: Settings,
        target: Target,
        backends: Sequence[str],
        *,
        memory_bytes: float,
        ends_at: float,
        all_ranks: bool,
    ) -> None:
        self._host, self._settings, self._target = host, settings, target
        self._backends = tuple(backends)
        self._memory_bytes, self._ends_at = memory_bytes, ends_at
        self._all_ranks = all_ranks
        self._known: dict[tuple[Phase, BackendQuery], dict[str, tuple[Status, str]]] = {}

    def measure(self, part: Part, case: AttentionCase) -> Iterator[Cell]:
        """Yield the cell of each backend as it is measured; never raises for one of them."""
        reason = self._why_skipped(case)
        left_out = self._left_out(case)
        rig: AttentionRig | None = None
        for name in self._backends:
            if name in left_out:
                status, why = left_out[name]
                yield Cell(part=part, case=case, backend=name, status=status, reason=why)
                continue
            if reason is None and rig is None:
                rig, reason = self._rig(case)
            if rig is None:
                why = reason or ""
                yield Cell(part=part, case=case, backend=name, status="skipped", reason=why)
                continue
            yield self._cell(rig, part, case, name)

    def _why_skipped(self, case: AttentionCase) -> str | None:
        if time.monotonic() > self._ends_at:
            return "the time that --time-limit gives was over"
        target = self._target
        layers = count_layers(case, target.device, target.dtype)
        page_bytes = 2 * case.page_size * case.num_kv_heads * case.head_dim * target.dtype.itemsize
        needed = layers * count_pages(case) * page_bytes
        if needed <= self._memory_bytes:
            return None
        return (
            f"K and V of {layers} layers take {needed / 2**30:.1f} GiB, --memory-gib allows "
            f"{self._memory_bytes / 2**30:.1f}"
        )

    def _left_out(self, case: AttentionCase) -> dict[str, tuple[Status, str]]:
        """Return why backends are not tried at a case, by qualified name."""
        target = self._target
        query = pool_query(case, self._host, self._settings, target.device, target.dtype)
        if (case.phase, query) not in self._known:
            found: dict[str, tuple[Status, str]] = {}
            rows = [row for row in explain_attention(self._host, query) if row.phase == case.phase]
            ranks = {f"{row.distribution}:{row.name}": row.rank or 0 for row in rows}
            usual = any(ranks.get(name, 0) > 0 for name in self._backends)
            for row, name in zip(rows, ranks, strict=True):
                if row.rank is None:
                    found[name] = ("refused", row.reason)
                elif not row.rank and usual and not self._all_ranks:
                    found[name] = ("skipped", _NOT_TRIED)
            self._known[case.phase, query] = found
        return self._known[case.phase, query]

    def _rig(self, case: AttentionCase) -> tuple[AttentionRig | None, str | None]:
        target = self._target
        try:
            rig = AttentionRig(case, self._host, self._settings, target.device, target.dtype)
        except Exception as error:  # one case that does not fit must not hide the others
            logger.debug("%s cannot be set up", case, exc_info=error)
            return None, f"{type(error).__name__}: {first_line(error)}"
        return rig, None

    def _cell(self, rig: AttentionRig, part: Part, case: AttentionCase, name: str) -> Cell:
        try:
            longer = _PUBLISHED_TIMES if part == "published" else 1
            run = rig.run(name, self._target.shortest_s * longer)
            error = rig.largest_error(run)
        except Exception as exception:  # one broken kernel must not hide the others
            logger.debug("%s on %s failed", case, name, exc_info=exception)
            reason = f"{type(exception).__name__}: {first_line(exception)}"
            return Cell(part=part, case=case, backend=name, status="failed", reason=reason)
        return self._measured(part, case, name, run, error)

    def _measured(self, part: Part, case: AttentionCase, name: str, run: Run, error: float) -> Cell:
        target, limit = self._target, TOLERANCES[self._target.dtype]
        us = run.timing.seconds * 1e6
        if case.phase == "decode":
            amount, most = case.kv_bytes(target.dtype.itemsize), target.ceilings.read_bytes_per_s
        else:
            amount, most = case.flops(), target.ceilings.flops_per_s
        right = error <= limit
        wrong = f"its relative error is {error:.2g}, the limit {limit:.2g}"
        if math.isinf(error):
            wrong = "its output is not all numbers"
        return Cell(
            part=part,
            case=case,
            backend=name,
            status="ok" if right else "wrong",
            reason="" if right else wrong,
            times_us=tuple(round(1e6 * one, 3) for one in run.timing.repeats),
            us=round(us, 3),
            rate=round(amount / us * 1e6),
            fraction=round(amount / us * 1e6 / most, 4),
            error=None if math.isinf(error) else float(f"{error:.3g}"),
            clock=run.timing.clock,
            set_up_s=round(run.set_up_s, 3),
        )


def usable_backends(
    host: PluginHost,
    settings: Settings,
    cases: Sequence[AttentionCase],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[str], dict[str, str]]:
    """Return the backends that can run any of the cases, and the reason against each other one.

    What has rank 0 is only measured where nothing else can run: the reference takes longer than all
    others together, others would compile for minutes. Whoever wants them names them.

    Returns:
        Qualified names; reasons by qualified name.
    """
    queries = {(one.phase, pool_query(one, host, settings, device, dtype)) for one in cases}
    best: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for phase, query in queries:
        for row in explain_attention(host, query):
            name = f"{row.distribution}:{row.name}"
            if row.phase != phase:
                continue
            if row.rank is None:
                reasons[name] = row.reason
            else:
                best[name] = max(row.rank, best.get(name, 0))
    found = [name for name, rank in best.items() if rank > 0] or list(best)
    refused = {name: reason for name, reason in reasons.items() if name not in best}
    return sorted(found), dict(sorted(refused.items()))


def first_line(error: Exception) -> str:
    """Return the first line of what an exception says, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]
