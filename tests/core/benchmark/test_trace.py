"""Idle time between decode steps, and the costliest kernels, on traces written by hand."""

import gzip
import json

import pytest

from minisgl.benchmark.trace import TraceSummary, covered, format_summary, summarize, summarize_file
from minisgl.cli import main
from minisgl.errors import SettingsError


def launch(correlation, name="cudaGraphLaunch", category="cuda_runtime"):
    return {
        "ph": "X", "cat": category, "name": name, "ts": 0.5, "dur": 3.0,
        "args": {"correlation": correlation},
    }  # fmt: skip


def ran(name, start, end, correlation, category="kernel"):
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start,
        "args": {"correlation": correlation, "stream": 7},
    }  # fmt: skip


def steps(*extra):
    """Three steps: 0 to 100, 110 to 210, 240 to 340, each an attention and a product."""
    events = [
        # Things that are on the device's timeline and are no activity of it.
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 100.0, "dur": 500.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 0.0, "dur": 340.0},
        # A launch whose kernels the trace does not have.
        launch(99),
    ]
    for correlation, start in ((11, 0.0), (12, 110.0), (13, 240.0)):
        events += [
            launch(correlation),
            ran("attention", start, start + 60, correlation),
            ran("product", start + 62, start + 100, correlation),
        ]
    return [*events, *extra]


def test_idle_time_goes_from_the_last_end_to_the_next_start():
    summary = summarize(steps())
    assert summary.num_steps == 3
    assert summary.idle_us == (10.0, 30.0)
    assert summary.idle_median_us == 20.0
    assert summary.idle_p90_us == pytest.approx(28.0)
    assert summary.span_median_us == 100.0
    assert summary.period_median_us == 120.0
    assert summary.gaps_in_step_us == 2.0


def test_other_activity_between_steps_is_not_idle():
    summary = summarize(
        steps(
            ran("copy", 205, 215, 77, "gpu_memcpy"),  # 5 of it lie in the second gap
            ran("fill", 213, 220, 78, "gpu_memset"),  # overlaps the copy: 5 more
            ran("rows", 235, 238, 79),  # 3 more
            ran("long ago", -50, -40, 80),
        )
    )
    assert summary.idle_us == (10.0, 17.0)


def test_steps_that_overlap_have_no_idle_time():
    """The last of a step to end need not be the last to begin."""
    events = [
        launch(1), ran("a", 0, 50, 1), ran("b", 10, 20, 1),
        launch(2), ran("a", 45, 80, 2),
        launch(3), ran("a", 81, 90, 3),
    ]  # fmt: skip
    assert summarize(events).idle_us == (0.0, 1.0)


def test_the_order_of_events_does_not_matter():
    assert summarize(list(reversed(steps()))) == summarize(steps())


@pytest.mark.parametrize(
    ("name", "category"),
    [("cudaGraphLaunch_v10000", "cuda_runtime"), ("cuGraphLaunch", "cuda_driver")],
)
def test_other_names_of_the_launch_count(name, category):
    events = [launch(1, name, category), ran("a", 0, 1, 1), launch(2, name, category)]
    assert summarize([*events, ran("a", 3, 4, 2)]).idle_us == (2.0,)


def test_kernels_outside_of_graphs_make_no_step():
    events = [launch(1, "cudaLaunchKernel"), ran("a", 0, 1, 1)]
    assert summarize(events) == TraceSummary(num_steps=0)
    assert "0 launches" in format_summary(summarize(events))


def test_kernels_are_added_up_per_step():
    summary = summarize(steps(ran("copy", 212, 214, 77, "gpu_memcpy"), ran("later", 250, 260, 81)))
    found = {kernel.name: (kernel.calls, kernel.us) for kernel in summary.kernels}
    # Two periods: from the first start to the third.
    assert found == {"attention": (1.0, 60.0), "product": (1.0, 38.0), "copy": (0.5, 1.0)}
    assert [kernel.name for kernel in summary.kernels] == ["attention", "product", "copy"]


def test_covered_counts_overlaps_once_and_nothing_outside():
    assert covered([(0, 4), (2, 6), (9, 20), (-5, 1)], 1, 10) == 6
    assert covered([], 0, 10) == 0
    assert covered([(0, 100)], 5, 3) == 0


def test_the_command_reads_what_the_profiler_writes(tmp_path, capsys):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": steps()}).encode()))
    assert summarize_file(path) == summarize(steps())
    assert main(["bench", "trace", str(path), "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert "idle between steps: median 20.0 us, 90th percentile 28.0 us" in text
    assert "attention" in text
    assert "product" not in text
    assert main(["bench", "trace", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["idle_us"] == [10.0, 30.0]


@pytest.mark.parametrize("data", [b"", b"{}", b"no json"])
def test_another_file_is_refused(tmp_path, data):
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(SettingsError, match="is no chrome trace"):
        summarize_file(path)
