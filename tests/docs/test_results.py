"""benchmarks/RESULTS.md says what the records say, and no more."""

import copy
import importlib.util
import json
import re
import sys
from typing import Any

import pytest

from support.distributions import ROOT
from support.measured_cells import cell, write_measurements

FOLDER = ROOT / "benchmarks"


def load_script():
    spec = importlib.util.spec_from_file_location("results_table", FOLDER / "results_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()
RIVALS = json.loads((FOLDER / "rivals.json").read_text(encoding="utf-8"))
RECORDS = script.read_records(FOLDER / "results")


def offline(model="Qwen3-0.6B", preset="minisgl-offline", device="NVIDIA H200", **changes):
    """A record as ``bench offline`` writes it, as far as tables read it."""
    rounds = [
        {"seed": seed, "counts": seed > 0, "num_output_tokens": tokens, "seconds": 2.0}
        for seed, tokens in enumerate((40_000, 54_000, 50_200))
    ]
    for one in rounds:
        one["tokens_per_second"] = one["num_output_tokens"] / one["seconds"]
    return {
        "benchmark": "offline",
        "model": model,
        "preset": preset,
        "date": "2026-12-01T10:00:00+00:00",
        "commit": "0123456789abcdef",
        "command": "minisgl bench offline --preset minisgl-offline",
        "settings": {"model.path": "models/Qwen3-0.6B", "cache.page_size": 64},
        "versions": {"python": "3.12.3"},
        "device": {"name": device},
        "workload": {"num_prompts": 256},
        "startup": {"process_to_ready_s": 15.04, "load_s": 9.0},
        "rounds": rounds,
        "tokens_per_second": 26_050.0,
        "profile": {"num_running": 256, "trace": {"idle_median_us": 14.2}},
        **changes,
    }


def row_of(text, title):
    """Return the cells of a line of the first table by the names of its columns."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    (cells,) = [line for line in lines if line[0] == title]
    return dict(zip(lines[0], cells, strict=True))


def test_the_document_is_what_the_records_give():
    document = script.DOCUMENT.read_text(encoding="utf-8")
    expected = script.with_tables(document, script.render(RECORDS, RIVALS))
    assert document == expected, "run: python benchmarks/results_table.py"


def test_each_record_agrees_with_itself_and_can_be_repeated():
    for name, record in RECORDS.items():
        script.check_record(record)
        assert record["commit"], f"{name} has no commit"
        assert not record["commit"].endswith("+changes"), name
        assert not re.search(r"(^|\s)/", record["command"]), f"{name} has a path of one machine"


def test_without_records_the_document_says_so():
    text = script.render({}, RIVALS)
    assert text.startswith("Nothing of minisgl has been measured yet.")
    row = row_of(text, "Qwen3-0.6B, 256 requests")
    assert row["vLLM 0.24.0"] == "22,710 / 22,600"
    assert row["mini-sglang 20fcd7f, FlashInfer"] == "20,980 / 21,120"
    assert (row["floor"], row["must"], row["reach"]) == ("37,060 / 38,130", "25,000", "28,000")
    assert (row["minisgl"], row["median"], row["verdict"]) == ("-", "-", "not measured")
    assert row_of(text, "Qwen3-14B, 256 requests")["SGLang 0.5.15"] == "6,230 / -"


def test_a_record_fills_its_rows():
    text = script.render({"a.json": offline()}, RIVALS)
    assert "Nothing" not in text
    speed = row_of(text, "Qwen3-0.6B, 256 requests")
    assert (speed["minisgl"], speed["median"]) == ("27,000 / 25,100", "26,050")
    assert speed["verdict"] == "must holds"
    start = row_of(text, "Qwen3-0.6B, from the start of the process until ready")
    assert (start["median"], start["verdict"]) == ("15.0", "must holds")
    idle = row_of(text, "Qwen3-0.6B, idle between decode graphs, 256 rows")
    assert (idle["median"], idle["verdict"]) == ("14.2", "reached")
    for other in ("Qwen3-14B, 256 requests", "Qwen3-0.6B, idle between decode graphs, 1 row"):
        assert row_of(text, other)["verdict"] == "not measured"
    assert "[a.json](results/a.json)" in text
    assert "0: 20,000, 1: 27,000, 2: 25,100" in text


def test_the_latest_run_on_the_card_counts():
    records = {
        "old": offline(tokens_per_second=1.0, date="2026-01-01T00:00:00+00:00"),
        "new": offline(),
        "elsewhere": offline(device="NVIDIA L4", date="2027-01-01T00:00:00+00:00"),
    }
    assert row_of(script.render(records, RIVALS), "Qwen3-0.6B, 256 requests")["median"] == "26,050"


@pytest.mark.parametrize(
    ("median", "verdict"),
    [(24_999.0, "misses must"), (25_000.0, "must holds"), (28_000.0, "reached")],
)
def test_the_verdict_is_about_the_median(median, verdict):
    text = script.render({"a": offline(tokens_per_second=median)}, RIVALS)
    assert row_of(text, "Qwen3-0.6B, 256 requests")["verdict"] == verdict


@pytest.mark.parametrize(("seconds", "verdict"), [(18.1, "misses must"), (12.0, "reached")])
def test_fewer_seconds_are_better(seconds, verdict):
    text = script.render({"a": offline(startup={"process_to_ready_s": seconds})}, RIVALS)
    title = "Qwen3-0.6B, from the start of the process until ready"
    assert row_of(text, title)["verdict"] == verdict


def test_a_run_about_a_setting_of_its_own_fills_no_row():
    record = offline(settings={"model.path": "models/Qwen3-0.6B", "scheduler.launch": "mixed"})
    text = script.render({"mixed.json": record}, RIVALS)
    assert row_of(text, "Qwen3-0.6B, 256 requests")["verdict"] == "not measured"
    assert "[mixed.json](results/mixed.json)" in text


def test_a_start_counts_for_the_packages_that_were_installed():
    quick, title = offline(), "Qwen3-0.6B, from the start of the process until ready"
    slow = offline(
        startup={"process_to_ready_s": 26.0}, versions={"python": "3", "flash-attn-4": "4.0"}
    )
    text = script.render({"quick.json": quick, "slow.json": slow}, RIVALS)
    assert row_of(text, title)["verdict"] == "must holds"
    title = "Qwen3-0.6B, the same with FlashAttention 4 installed"
    assert row_of(text, title)["verdict"] == "misses must"


def test_a_profile_of_fewer_rows_fills_no_row():
    profile = {"num_running": 250, "trace": {"idle_median_us": 1.0}}
    text = script.render({"a": offline(profile=profile)}, RIVALS)
    title = "Qwen3-0.6B, idle between decode graphs, 256 rows"
    assert row_of(text, title)["verdict"] == "not measured"


def test_a_record_that_was_edited_is_noticed():
    script.check_record(offline())
    for key, value in (("tokens_per_second", 30_000.0), ("rounds", None)):
        edited = copy.deepcopy(offline())
        if value is None:
            edited["rounds"][1]["tokens_per_second"] = 30_000.0
        else:
            edited[key] = value
        with pytest.raises(ValueError, match="its rounds give"):
            script.check_record(edited)


def test_kernels_get_a_table_of_their_own():
    line = {"case": "rms_norm:1", "implementation": "x", "reason": "", "clock": "graph"}
    record = {
        "benchmark": "kernels",
        "date": "2026-12-01",
        "commit": "abc",
        "command": "minisgl bench kernels",
        "device": {"name": "NVIDIA H200"},
        "ceilings": {"read_bytes_per_s": 4.58e12, "flops_per_s": 7.87e14},
        "attention": [{**line, "us": None, "case": "decode", "reason": "needs | a GPU"}],
        "ops": [{**line, "us": 2.25, "rate": 2.29e12, "kind": "bytes", "fraction": 0.5}],
    }
    text = script.render({"k.json": record}, RIVALS)
    assert "reads 4,580 GB/s (a reduction) and computes 787 TFLOP/s" in text
    assert "| decode | x | - | - | - | needs \\| a GPU |" in text
    assert "| rms_norm:1 | x | 2.2 | 2,290 | - | 50% |" in text


def test_a_profile_becomes_a_table_of_its_kernels():
    kernels = [
        {"name": "void attention::Kernel<int, 3>(Params)", "calls": 28.0, "us": 750.0},
        {"name": "norm_kernel", "calls": 57.0, "us": 12.34},
    ]
    trace = {
        "kernels": kernels, "period_median_us": 1000.0, "gaps_in_step_us": 120.0,
        "idle_median_us": 14.2,
    }  # fmt: skip
    record = offline(profile={"num_running": 1, "trace": trace})
    text = script.render({"run.json": record}, RIVALS)
    assert "## A decode step of Qwen3-0.6B with 1 row\n" in text
    assert "1,000 us from start to start, of which 120 us between kernels and 14.2 us" in text
    assert "| `attention::Kernel` | 28 | 750.0 | 75.0% |" in text
    assert "| `norm_kernel` | 57 | 12.3 | 1.2% |" in text


@pytest.fixture
def attention(tmp_path):
    """A run of the grid: published cases, and a grid of two heads."""
    case = "decode:256x450-1350:16/8x128:p16"
    measured: dict[str, Any] = {"times_us": [90.0, 100.0, 101.0], "rate": 4.122e12, "fraction": 0.9}
    slower = {**measured, "times_us": [200.0], "rate": 2.061e12, "fraction": 0.45}
    shared = "decode:64x256+8192:16/8x128"
    cells = [
        cell(case, "p:quick", 100.0, part="published", **measured),
        cell(case, "p:slow", 200.0, part="published", **slower),
        cell(case, "p:liar", 1.0, "wrong", part="published", **slower),
        *(cell(f"{shared}:p{size}", "p:slow", us, part="published", **measured)
          for size, us in ((16, 90.0), (64, 50.0))),
        cell(f"{shared}:p16", "p:quick", 200.0, part="published", **measured),
        *(cell(f"{phase}:1x512:16/8x128:p16", f"p:{name}", us, **slower)
          for phase in ("decode", "prefill") for name, us in (("quick", 10.0), ("slow", 40.0))),
        cell("decode:1x512:40/8x128:p16", "p:slow", 9.0, **slower),
        cell("decode:1x512:40/8x128:p16", "p:quick", None, "refused"),
    ]  # fmt: skip
    path = write_measurements(tmp_path / "attention.json", cells)
    return json.loads(path.read_text())


def test_published_cases_of_attention_are_judged_by_the_fastest_right_backend(attention):
    text = script.render({"attention-h200.json": attention}, RIVALS)
    text = text.partition("## Attention on NVIDIA H200")[2].partition("Ranks:")[0]
    row = row_of(text, "decode, 256 rows of 450 to 1,350 tokens, 16/8 heads, page size 16")
    assert (row["minisgl"], row["by"]) == ("4.12", "quick, page size 16")
    assert (row["must"], row["reach"], row["stretch"]) == ("4.1", "4.18", "4.3")
    assert row["verdict"] == "must holds"
    (shared,) = [one for one in RIVALS["attention"] if "than" in one]
    row = row_of(text, shared["title"])
    assert (row["minisgl"], row["by"], row["verdict"]) == ("4", "slow, page size 64", "reached")
    row = row_of(text, "prefill, 8,192 tokens, causal, 32/8 heads")
    assert (row["minisgl"], row["verdict"]) == ("-", "not measured")


def test_ranks_of_attention_get_a_table(attention):
    text = script.render({"attention-h200.json": attention}, RIVALS)
    assert "| phase | page size | heads | quick | slow |" in text
    assert "| decode | 16 | 16/8 | 100 | 25 |" in text
    assert "| decode | 16 | 40/8 | - | 100 |" in text
    assert "| prefill | 16 | 16/8 | 100 | 25 |" in text


def test_a_cell_that_was_edited_is_noticed(attention):
    first = attention["cells"][0]
    attention["cells"] = [first]
    with pytest.raises(ValueError, match="its rate not"):
        script.check_record({**attention, "ceilings": {"read_bytes_per_s": 9e12}})
    attention["ceilings"]["read_bytes_per_s"] = first["rate"] / first["fraction"]
    script.check_record(attention)
    first["us"] = 99.0
    with pytest.raises(ValueError, match="not the median of its times"):
        script.check_record(attention)


def test_experts_get_a_table_and_are_judged_by_the_best_of_the_others():
    def line(tokens, us, others, num_bytes=0):
        named = {name: {"us": one, "error": 0.003} for name, one in others.items()}
        return {"tokens": tokens, "us": us, "bytes": num_bytes, "flops": 5e8, "others": named}

    enough = 0.71 * 100e-6 * RIVALS["moe"]["read_bytes_per_s"]
    lines = [
        line(1, 25.0, {"published": 30.0, "flashinfer": 20.0}),
        line(16, 100.0, {"published": 100.0}),
        line(64, 100.0, {}),
        line(256, 100.0, {"published": 110.0}, enough),
        line(256, 102.0, {"published": 110.0}, enough),
    ]
    record = {**offline(), "benchmark": "moe_layers", "model": "Some-MoE", "lines": lines}
    record["weights_dtype"] = "auto"
    text = script.render({"moe.json": record}, RIVALS).partition("## Routed experts of Some-MoE")[2]
    assert text.startswith(" on ")
    assert "To reach: the time of the best of them" in text
    assert (
        "| tokens | minisgl, us | of the floor | TFLOP/s | flashinfer, us | published, us |" in text
    )
    assert "| 1 | 25.0 | 0% | 20.0 | 20.0 | 30.0 | 1.25 times the best |" in text
    assert "| 16 | 100.0 | 0% | 5.0 | - | 100.0 | reached |" in text
    assert "| 64 | 100.0 | 0% | 5.0 | - | - | nothing to compare |" in text
    assert "| 256 | 100.0 | 71% | 5.0 | - | 110.0 | reached |" in text
    assert "| 256 | 102.0 | 70% | 4.9 | - | 110.0 | misses reach |" in text
    record = {**record, "weights_dtype": "fp8", "lines": [line(64, 100.0, {})]}
    text = script.render({"moe.json": record}, RIVALS).partition("## Routed experts of Some-MoE")[2]
    assert text.startswith(" in fp8 on ")
    assert "To reach" not in text
