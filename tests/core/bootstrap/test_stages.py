"""What a start says about its parts."""

import pytest

from minisgl.bootstrap.stages import Stages


def test_parts_are_said_if_they_took_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 13.0, 13.02, 20.5])
    monkeypatch.setattr("minisgl.bootstrap.stages.time.perf_counter", lambda: next(times))
    stages = Stages()
    for name in ("backends", "weights", "decode graphs"):
        stages.done(name)
    assert str(stages) == "10.5 s (backends 3.0, decode graphs 7.5)"


def test_a_quick_start_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.bootstrap.stages.time.perf_counter", lambda: 1.0)
    stages = Stages()
    stages.done("weights")
    assert str(stages) == "0.0 s"
