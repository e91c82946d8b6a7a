"""Aborts that overtake their request are remembered for a minute, each for one request."""

import time

import pytest

from minisgl.scheduler.early_aborts import EarlyAborts


def test_an_abort_is_remembered_for_a_minute_and_taken_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    aborts = EarlyAborts()
    aborts.add(1)
    now += 40
    aborts.add(2)
    now += 30
    aborts.add(3)
    assert [aborts.take(uid) for uid in (1, 2, 3, 4)] == [False, True, True, False]
    assert not aborts.take(2)
