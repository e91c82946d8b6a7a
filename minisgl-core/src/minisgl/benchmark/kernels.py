"""``minisgl bench kernels``: attention backends and operations beside what the device can do."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from minisgl.benchmark.attention_cases import AttentionCase
from minisgl.benchmark.attention_rig import AttentionRig
from minisgl.benchmark.moe_cases import MoeShape, moe_cases
from minisgl.benchmark.op_cases import OpCase
from minisgl.benchmark.timing import Target, Timing, time_calls
from minisgl.errors import DoesNotFitError, PluginError
from minisgl.kernel.ops import OpTable
from minisgl.moe.interface import MoeBackend
from minisgl.plugins.host import PluginHost
from minisgl.plugins.options import Options
from minisgl.plugins.records import BackendQuery
from minisgl.plugins.selection import explain_moe, explain_ops, select_moe
from minisgl.settings import Settings

logger = logging.getLogger(__name__)

Kind = Literal["bytes", "flops"]

_REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One line of the table.

    Attributes:
        case: what was run.
        implementation: by whom.
        us: microseconds a call; ``None`` if it cannot run this case.
        rate: bytes or operations a second.
        kind: which of the two.
        fraction: of what the device reaches.
        clock: how it was timed, see ``Timing``.
        reason: why it could not run.
    """

    case: str
    implementation: str
    us: float | None = None
    rate: float | None = None
    kind: Kind = "bytes"
    fraction: float | None = None
    clock: str = ""
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def bench_attention(
    cases: Sequence[AttentionCase],
    backends: Sequence[str],
    host: PluginHost,
    settings: Settings,
    target: Target,
) -> Iterator[Measured]:
    """Yield a line for each case and backend as it is measured.

    Args:
        cases: shapes.
        backends: their names.
        host: who offers them.
        settings: the KV pool, and the options of backends.
        target: what is measured on.
    """
    for case in cases:
        try:
            rig = AttentionRig(case, host, settings, target.device, target.dtype)
        except (DoesNotFitError, torch.OutOfMemoryError) as error:
            yield Measured(case=str(case), implementation="-", reason=_first_line(error))
            continue
        for name in backends:
            yield _attention_line(rig, case, name, target)


def bench_ops(
    cases: Iterator[OpCase],
    host: PluginHost,
    query: BackendQuery,
    target: Target,
) -> Iterator[Measured]:
    """Yield a line for each case and implementation of its operation that can run here."""
    names = [entry.name for entry in fields(OpTable)]
    usable = [row for row in explain_ops(host, query, names) if row.outcome != "refused"]
    offers = {(offer.record.op, offer.record.name, offer.distribution): offer for offer in host.ops}
    reference = OpTable()
    for case in cases:
        title = f"{case.op}{f'.{case.label}' if case.label else ''}:{case.rows}"
        for row in usable:
            if row.kind != f"op {case.op}":
                continue
            try:
                if row.name == _REFERENCE:
                    implementation = getattr(reference, case.op)
                else:
                    implementation = offers[case.op, row.name, row.distribution].record.load()
                with torch.inference_mode():
                    calls = case.calls(implementation, target.device)
                    timing = time_calls(
                        calls, target.device, graph=True, shortest_s=target.shortest_s
                    )
            except Exception as error:  # one broken kernel must not hide the others
                logger.debug("%s of %s failed", title, row.name, exc_info=error)
                yield Measured(case=title, implementation=row.name, reason=_first_line(error))
                continue
            rates = _rates(case.kind, case.amount, timing, target)
            yield Measured(case=title, implementation=row.name, **rates)


def bench_moe(
    shape: MoeShape,
    tokens: Sequence[int],
    host: PluginHost,
    query: BackendQuery,
    *,
    options: Options,
    target: Target,
    only: str | None = None,
) -> Iterator[Measured]:
    """Yield a line for each number of tokens and MoE backend, or ``only`` one.

    What cannot run here has a single line, with the reason.

    The rate is of the weights of all chosen experts, or of operations, whichever the device would
    take longer for.
    """
    backends: dict[str, MoeBackend] = {}
    name = query.moe_weights_dtype
    quantized: torch.dtype | None = None if name is None else getattr(torch, name)
    context = shape.context(target.device, target.dtype, max(tokens), quantized)
    for row in explain_moe(host, query):
        if only not in (None, f"{row.distribution}:{row.name}"):
            continue
        if row.outcome == "refused":
            yield Measured(case="moe", implementation=row.name, reason=row.reason)
            continue
        try:
            chosen = select_moe(host, query, f"{row.distribution}:{row.name}", options)
            backends[row.name] = chosen.record.create(context, chosen.settings)
        except Exception as error:  # one broken backend must not hide the others
            logger.debug("%s cannot be created", row.name, exc_info=error)
            yield Measured(case="moe", implementation=row.name, reason=_first_line(error))
    for case in moe_cases(shape, tokens, target.device, target.dtype, quantized):
        seconds_of_bytes = case.num_bytes / target.ceilings.read_bytes_per_s
        reads = seconds_of_bytes >= case.flops / target.ceilings.flops_per_s
        kind: Kind = "bytes" if reads else "flops"
        amount = case.num_bytes if reads else case.flops
        for name, backend in backends.items():
            title = f"moe:{case.tokens}"
            try:
                with torch.inference_mode():
                    timing = time_calls(
                        case.calls(backend), target.device, graph=backend.cuda_graphs,
                        shortest_s=target.shortest_s,
                    )  # fmt: skip
            except Exception as error:
                logger.debug("%s of %s failed", title, name, exc_info=error)
                yield Measured(case=title, implementation=name, reason=_first_line(error))
                continue
            rates = _rates(kind, amount, timing, target)
            yield Measured(case=title, implementation=name, **rates)


def _attention_line(rig: AttentionRig, case: AttentionCase, name: str, target: Target) -> Measured:
    short = name.rpartition(":")[2]
    try:
        timing = rig.time(name, target.shortest_s)
    except PluginError as error:
        return Measured(case=str(case), implementation=short, reason=_first_line(error))
    except Exception as error:  # one broken kernel must not hide the others
        logger.debug("%s on %s failed", case, name, exc_info=error)
        reason = f"{type(error).__name__}: {_first_line(error)}"
        return Measured(case=str(case), implementation=short, reason=reason)
    if case.phase == "decode":
        rates = _rates("bytes", case.kv_bytes(target.dtype.itemsize), timing, target)
    else:
        rates = _rates("flops", case.flops(), timing, target)
    return Measured(case=str(case), implementation=short, **rates)


def _rates(kind: Kind, amount: int, timing: Timing, target: Target) -> dict[str, Any]:
    """Return the fields of ``Measured`` that follow from a time."""
    rate, ceilings = amount / timing.seconds, target.ceilings
    ceiling = ceilings.read_bytes_per_s if kind == "bytes" else ceilings.flops_per_s
    return {
        "us": timing.seconds * 1e6,
        "rate": rate,
        "kind": kind,
        "fraction": rate / ceiling,
        "clock": timing.clock,
    }


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
