"""Which backend a decode graph attends through, and who is asked to plan it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from minisgl.attention.by_rows import DecodeByRows
from minisgl.attention.hybrid import HybridBackend, RoutedPlan
from minisgl.attention.interface import AttentionBackend

FEW_ARE_FASTER: dict[str, list[float]] = {"wide": [10, 10, 20, 30], "narrow": [4, 9.8, 15, 60]}
"""Times of two backends for 1, 2, 4 and 8 rows."""


class Noting:
    """A backend that notes what is asked of its part in graphs."""

    store_fusion = False

    def __init__(self, name: str, *, shares: bool = False) -> None:
        self.name = name
        self.takes_shared_prefixes = shares
        self.cuda_graphs = self
        self.asked: list[Any] = []

    def prepare_capture(self, batch: Any) -> str:
        return f"{self.name} {batch.num_rows}"

    def enqueue(self, batch: Any, plan: str) -> None:
        self.asked.append(("enqueue", plan))

    def prepare_replay(self, plan: str, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        self.asked.append(("replay", plan, kv_lens.tolist(), slot))

    def attend(self, q: Any, layer: Any, plan: Any, new_kv: Any = None) -> Any:
        self.asked.append(("attend", plan))
        return q


class Batch:
    def __init__(self, num_rows: int, shared: object = None) -> None:
        self.num_rows = num_rows
        self.shared = shared


class Rig:
    """Two backends with known times."""

    def __init__(self, times: dict[str, list[float]], *, pool: bool = True) -> None:
        self.backends: dict[str, Any] = {name: Noting(name) for name in times}
        self.measured: list[tuple[str, int]] = []
        self.pool = pool

        def measure(backend: Any, context: Any, num_rows: int) -> float | None:
            self.measured.append((backend.name, num_rows))
            place = (num_rows - 1).bit_length()
            return times[backend.name][place] if self.pool else None

        context: Any = SimpleNamespace(max_running_requests=6)
        self.graphs = DecodeByRows(self.backends, context, measure)

    def chosen(self, num_rows: int) -> str:
        batch: Any = Batch(num_rows)
        plan = self.graphs.prepare_capture(batch)
        assert plan.backend is self.backends[plan.plan.split()[0]]
        return str(plan.plan)


def test_each_size_is_the_fastest_one_s_and_the_first_one_s_where_they_are_close() -> None:
    rig = Rig(FEW_ARE_FASTER)
    assert rig.chosen(1) == "narrow 1"
    assert rig.chosen(2) == "wide 2", "two percent are noise"
    assert rig.chosen(3) == "narrow 3"
    assert rig.chosen(4) == "narrow 4"
    assert rig.chosen(5) == "wide 5"
    assert rig.chosen(6) == "wide 6"


def test_sizes_between_two_powers_are_measured_once_and_no_more_rows_than_run() -> None:
    rig = Rig(FEW_ARE_FASTER)
    for rows in (6, 5, 4, 3, 3, 1):
        rig.chosen(rows)
    assert rig.measured == [(name, rows) for rows in (6, 4, 1) for name in ("wide", "narrow")]


def test_a_rehearsal_without_a_pool_takes_the_first_and_remembers_nothing() -> None:
    rig = Rig(FEW_ARE_FASTER, pool=False)
    assert rig.chosen(1) == "wide 1"
    rig.pool = True
    assert rig.chosen(1) == "narrow 1"


def test_a_recorded_launch_is_planned_and_attended_by_the_backend_of_its_size() -> None:
    rig = Rig(FEW_ARE_FASTER)
    first: AttentionBackend = rig.backends["wide"]
    hybrid = HybridBackend(first, first, rig.graphs)
    assert hybrid.cuda_graphs is rig.graphs
    batch: Any = Batch(1)
    plan = rig.graphs.prepare_capture(batch)
    assert isinstance(plan, RoutedPlan)
    rig.graphs.enqueue(batch, plan)
    rig.graphs.prepare_replay(plan, np.array([7], dtype=np.int32), 1)
    layer: Any = None
    hybrid.attend(torch.zeros(1), layer, plan)
    expected = [("enqueue", "narrow 1"), ("replay", "narrow 1", [7], 1), ("attend", "narrow 1")]
    assert rig.backends["narrow"].asked == expected
    assert rig.backends["wide"].asked == []


def test_launches_with_shared_prefixes_are_those_of_a_backend_that_takes_them() -> None:
    backends: dict[str, Any] = {"plain": Noting("plain"), "shares": Noting("shares", shares=True)}
    context: Any = SimpleNamespace(max_running_requests=6)
    graphs = DecodeByRows(backends, context, lambda backend, *_: 1 + (backend.name == "shares"))
    assert graphs.takes_shared_prefixes
    batch: Any = Batch(2)
    assert graphs.prepare_capture(batch).plan == "plain 2"
    batch = Batch(2, shared=object())
    assert graphs.prepare_capture(batch).plan == "shares 2"
    first: AttentionBackend = backends["plain"]
    assert HybridBackend(first, first, graphs, takes_shared_prefixes=True).takes_shared_prefixes
    assert not HybridBackend(first, first).takes_shared_prefixes


def test_what_wins_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "minisgl"):
        Rig(FEW_ARE_FASTER).chosen(1)
    assert [one.getMessage() for one in caplog.records] == [
        "decode graphs of up to 1 rows attend through narrow: 4.0 us a layer, wide takes 10.0"
    ]
