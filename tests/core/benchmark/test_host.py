"""``minisgl bench host`` drives what it says, and its comparison can fail."""

import json

import numpy as np
import pytest

from minisgl.benchmark import host
from minisgl.benchmark.host import HostResult, Samples, bench_host, bench_hosts, growth
from minisgl.benchmark.plan_replay import PlanReplay
from minisgl.cli import main
from support.scheduling import Harness


def test_decode_steps_are_measured_and_staged_bytes_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "CHECK_EVERY", 20)
    result = bench_host(rows=6, page_size=4, num_steps=150, prompt=30)
    decode, prefill = result.decode.summary(), result.prefill.summary()
    assert decode["steps"] == 150
    assert 5 < decode["tokens"] <= 6
    parts = sum(decode[name] for name in ("receive", "choose", "stage", "commit", "send"))
    assert parts == pytest.approx(decode["mean"])
    assert prefill["steps"] >= 1
    serving = result.serving.summary()
    assert serving["steps"] == 150
    assert serving["tokens"] > 6, "prompts of newcomers are among them"
    assert result.num_comparisons >= 7


def test_memory_is_that_of_a_set_up_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SETTLED_AFTER", 4)
    monkeypatch.setattr(host, "COHORT_STEPS", 10)
    monkeypatch.setattr(host, "SERVING_TOKENS", 8)
    alone = bench_host(rows=2, page_size=4, num_steps=40, prompt=9)
    assert alone.memory_growth is not None
    assert alone.settled_steps > 0
    pair = bench_hosts([2, 3], page_size=4, num_steps=40, prompt=9)
    assert [one.memory_growth for one in pair] == [None, None]


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "host", "--rows", "2,3", "--page-sizes", "16", "--steps", "30", "--json"])
    assert code == 0
    results = json.loads(capsys.readouterr().out)
    assert [(one["rows"], one["page_size"]) for one in results] == [(2, 16), (3, 16)]
    assert all(one["decode"]["steps"] == 30 for one in results)


@pytest.mark.parametrize("flag", ["--rows=0", "--rows=a", "--steps=-1", "--page-sizes=16,,1"])
def test_a_wrong_number_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", flag]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda replay: replay.rows.__setitem__(0, replay.rows[0] + 1), "rows differ"),
        (lambda replay: replay.lengths.__iadd__(1), "lengths differ"),
        (lambda replay: replay.pages.__iadd__(1), "slots differ"),
        (lambda replay: replay.pages[:, 0].__iadd__(1), "pages differ"),
    ],
)
def test_the_comparison_sees_what_is_wrong(spoil: object, what: str) -> None:
    """Catches: a comparison that compares a thing with itself."""
    harness = Harness(page_size=4, rows=3)
    for uid in range(3):
        harness.submit(uid, [uid + 2] * 9, max_tokens=20, min_tokens=20)
    for _ in range(6):
        harness.step()
    replay = PlanReplay(harness.engine.info)
    words = [harness.engine.pack(plan) for plan in harness.engine.plans]
    replay.apply(words)
    scheduler = harness.scheduler
    assert len(scheduler.decode_rows) == 3
    replay.compare(scheduler.decode_rows, scheduler.table)
    spoil(replay)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=what):
        replay.compare(scheduler.decode_rows, scheduler.table)


def test_a_missing_plan_is_noticed() -> None:
    harness = Harness()
    harness.submit(0, [2, 3, 4], max_tokens=9, min_tokens=9)
    for _ in range(5):
        harness.step()
    words = [harness.engine.pack(plan) for plan in harness.engine.plans]
    with pytest.raises(AssertionError, match="plan 2 is missing"):
        PlanReplay(harness.engine.info).apply([*words[:2], *words[3:]])


def test_growth_is_the_ratio_of_1024_to_32_rows() -> None:
    results = []
    for rows, cost in ((32, 50.0), (256, 80.0), (1024, 150.0)):
        result = HostResult(rows, 16, 2)
        result.decode.add({"choose": cost}, 1.0, rows)
        results.append(result)
    assert growth(results) == {16: 3.0}
    assert growth(results[1:]) == {}


def test_samples_keep_no_more_than_their_capacity() -> None:
    samples = Samples(2)
    for cost in (1.0, 3.0, 100.0):
        samples.add({"send": cost}, 0.5, 4)
    assert samples.summary()["mean"] == 2.0
    assert np.isclose(samples.summary()["cpu"], 0.5)
