"""A process notices from its clock that it was stopped."""

import pytest

from minisgl.distributed.suspension import SuspensionWatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("missed", "since", "expected"),
    [(12.0, 0.0, 12.0), (12.0, 9.0, 12.0), (12.0, 11.0, 0.0), (4.0, 0.0, 0.0), (0.5, 0.0, 0.0)],
)
def test_only_a_long_and_recent_suspension_counts(
    missed: float, since: float, expected: float
) -> None:
    clock = Clock()
    watch = SuspensionWatch(clock)
    clock.now += missed + 0.25
    for _ in range(1 + round(since / 0.25)):
        watch.look()
        clock.now += 0.25
    clock.now -= 0.25
    assert watch.recent(within=10.0, least=5.0) == pytest.approx(expected)
