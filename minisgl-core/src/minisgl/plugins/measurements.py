"""Measurements of attention backends, and the ranks that follow from them. Imports no torch.

``minisgl bench kernels --attention --json FILE`` writes them. The setting
``attention.measurements`` points at such a file, and the ranks in the records of our own plugins
follow from one.

A backend's rank for a phase, page size and heads is the geometric mean, over the cases that it ran,
of the fastest backend's time divided by its own, in percent. A backend that computed anything wrong
there, or failed, has none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, log2
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from minisgl.errors import SettingsError
from minisgl.plugins.records import BackendQuery, Phase

FORMAT: Final = 1
"""Of the files that this version writes and reads."""

SETTING: Final = "attention.measurements"
_COMMAND: Final = "minisgl bench kernels --attention --json FILE"

LEAST_GAIN: Final = 0.05
"""Of the time: what a backend must be faster by, in any case, to be worth a try beside another."""

T = TypeVar("T")

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Microseconds = Annotated[float, msgspec.Meta(ge=1e-3, le=1e12)]
"""Beyond these no ratio of two is a number; a file holds three decimals."""


class MeasuredCell(msgspec.Struct, frozen=True, kw_only=True):
    """One backend at one case; see ``minisgl.benchmark.attention_cells.Cell``."""

    part: str
    case: str
    phase: Phase
    rows: _Count
    num_q_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    page_size: _Count
    backend: str
    status: Literal["ok", "wrong", "refused", "failed", "skipped"]
    reason: str
    us: _Microseconds | None

    @property
    def shape(self) -> "Shape":
        """Return the page size and the heads."""
        return Shape(self.page_size, self.num_q_heads, self.num_kv_heads, self.head_dim)


class DeviceName(msgspec.Struct, frozen=True):
    """Of the device that was measured."""

    name: str


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str
    format: int | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    dtype: str
    device: DeviceName
    cells: tuple[MeasuredCell, ...]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What ranks are asked for: tokens a page, heads and their size."""

    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_dim}"
        return f"{heads} heads, page size {self.page_size}"

    def distance(self, other: "Shape") -> float:
        """Return by how many doublings page size, heads and their size differ, all together."""
        return sum(abs(log2(getattr(self, name) / getattr(other, name))) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class MeasuredRank:
    """What measurements say about a backend.

    Attributes:
        rank: 1 to 100; ``None``: it must not be chosen, ``reason`` says why.
        reason: against it; empty if there is none.
        source: where that is from.
    """

    rank: int | None
    reason: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was measured, and for how many rows it is asked.

    Attributes:
        file: where it is from, for messages.
        date: of the measurement, ISO 8601.
        device: its name.
        dtype: of queries, K and V.
        cells: those of the grid; published cases are beside it.
        max_rows: most decode rows that will run; ``None``: as many as were measured.
    """

    file: str
    date: str
    device: str
    dtype: str
    cells: tuple[MeasuredCell, ...]
    max_rows: int | None = None

    def judge(self, backend: str, query: BackendQuery, phase: Phase) -> MeasuredRank | None:
        """Return the rank of a backend, from the measured heads and page size nearest to a query's.

        Args:
            backend: its qualified name.
            query: what it must run on.
            phase: of a launch.

        Returns:
            ``None`` if it was not measured there.
        """
        shape, cells = self._nearest(query, phase)
        if shape is None:
            return None
        bad = [one for one in cells if one.backend == backend and one.status in ("wrong", "failed")]
        source = f"measured on {self.device}, {self.file}, {self.date[:10]}: {shape}"
        if bad:
            verb = "computed something wrong in" if bad[0].status == "wrong" else "failed in"
            reason = f"it {verb} {bad[0].case} of {self.file}: {bad[0].reason}"
            return MeasuredRank(None, reason, source)
        score = scores(cells).get(backend)
        if score is None:
            return None
        return MeasuredRank(max(1, round(100 * score)), "", source)

    def not_measured(self, query: BackendQuery, phase: Phase) -> str:
        """Say what the rank of a backend that ``judge`` knows nothing about is worth."""
        shape, _ = self._nearest(query, phase)
        if shape is None:
            return f"{self.file} has no {phase}"
        return f"{self.file} does not have it at {shape}: below all that it has"

    def worth_a_try(self, backend: str, chosen: str, query: BackendQuery) -> bool:
        """Return whether an engine may want to decode some numbers of rows on another backend.

        That is if it was clearly faster than the chosen one in any case, or was not measured.
        """
        _, cells = self._nearest(query, "decode")
        ours, theirs = _times(cells, backend), _times(cells, chosen)
        common = ours.keys() & theirs.keys()
        return not common or any(ours[case] < (1 - LEAST_GAIN) * theirs[case] for case in common)

    def check(self, device: str, dtype: str) -> None:
        """Refuse to be used elsewhere: what is fastest differs from device to device.

        Args:
            device: name of the one at hand.
            dtype: that the model runs in.

        Raises:
            SettingsError: one of them is another one.
        """
        if self.device != device:
            raise SettingsError(
                f"{SETTING}={self.file!r} is of device {self.device}, this is {device}; measure "
                f"here with {_COMMAND}, or leave the setting out"
            )
        if self.dtype != dtype:
            raise SettingsError(
                f"{SETTING}={self.file!r} was measured in {self.dtype}, the model runs in {dtype}; "
                f"measure with {_COMMAND} --dtype {dtype}, or leave the setting out"
            )

    def _nearest(
        self, query: BackendQuery, phase: Phase
    ) -> tuple[Shape | None, list[MeasuredCell]]:
        """Return the measured shape that is nearest to the query's, and its cells."""
        of_phase = [one for one in self.cells if one.phase == phase]
        shapes = {one.shape for one in of_phase if one.status == "ok"}
        wanted = Shape(query.page_size, query.num_q_heads, query.num_kv_heads, query.head_dim)
        if not shapes:
            return None, []
        found = min(shapes, key=lambda one: (one.distance(wanted), one))
        cells = [one for one in of_phase if one.shape == found]
        return found, _up_to(cells, self.max_rows) if phase == "decode" else cells


def read_measurements(
    path: Path, max_rows: int | None = None, setting: str = SETTING
) -> Measurements:
    """Return what ranks follow from in a file of measurements.

    Args:
        path: of the file.
        max_rows: most decode rows that will run; cells of more rows do not count.
        setting: what names the file, for messages.

    Raises:
        SettingsError: it is missing, no such file, of another version, or has nothing in it.
    """
    file = read_file(path, setting, _File)
    cells = tuple(one for one in file.cells if one.part == "grid")
    if not any(one.status == "ok" for one in cells):
        raise SettingsError(
            f"{setting}={str(path)!r} holds no case of the grid that any backend ran; measure "
            f"again with {_COMMAND}"
        )
    return Measurements(
        file=str(path),
        date=file.date,
        device=file.device.name,
        dtype=file.dtype,
        cells=cells,
        max_rows=max_rows,
    )


def read_file(path: Path, setting: str, kind: type[T]) -> T:
    """Return a file of measurements as ``kind``, a ``msgspec`` struct of some of its fields.

    Args:
        path: of the file.
        setting: what names it, for messages.
        kind: what of it is wanted.

    Raises:
        SettingsError: it is missing, no such file, or of another version.
    """
    name = f"{setting}={str(path)!r}"
    try:
        text = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(
            f"{name} cannot be read: {reason}; write one with {_COMMAND}"
        ) from error
    head = _decode(text, _Head, name)
    if head.benchmark != "attention":
        raise SettingsError(
            f"{name} holds the benchmark {head.benchmark!r}, not attention; write one "
            f"with {_COMMAND}"
        )
    if head.format != FORMAT:
        raise SettingsError(
            f"{name} has format {head.format}, this version reads {FORMAT}; measure "
            f"again with {_COMMAND}"
        )
    return _decode(text, kind, name)


def scores(cells: Iterable[MeasuredCell]) -> dict[str, float]:
    """Return each backend's share of the fastest one's speed, by qualified name.

    The geometric mean over the cases that it ran. Who was wrong or failed in any has no share.
    """
    right = [one for one in cells if one.status == "ok" and one.us]
    bad = {one.backend for one in cells if one.status in ("wrong", "failed")}
    good = [one for one in right if one.backend not in bad]
    best: dict[str, float] = {}
    for one in good:
        best[one.case] = min(one.us or 0.0, best.get(one.case, one.us or 0.0))
    logs: dict[str, list[float]] = {}
    for one in good:
        logs.setdefault(one.backend, []).append(log(best[one.case] / (one.us or 0.0)))
    return {backend: exp(sum(found) / len(found)) for backend, found in logs.items()}


def _times(cells: Sequence[MeasuredCell], backend: str) -> Mapping[str, float]:
    return {
        one.case: one.us
        for one in cells
        if one.backend == backend and one.status == "ok" and one.us
    }


def _up_to(cells: list[MeasuredCell], max_rows: int | None) -> list[MeasuredCell]:
    """Leave out cells of more rows than the fewest that were measured for so many."""
    enough = [one.rows for one in cells if max_rows is not None and one.rows >= max_rows]
    return [one for one in cells if not enough or one.rows <= min(enough)]


def _decode(text: bytes, kind: type[T], name: str) -> T:
    decoder: Any = msgspec.json.Decoder(kind)
    try:
        found: T = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{name} is no file of measurements: {error}; write one with {_COMMAND}"
        ) from error
    return found
