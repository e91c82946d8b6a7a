"""Ranks in the records of our plugins are those of the run that is kept in benchmarks/results."""

import importlib.util
import json

import pytest

from minisgl.plugins.host import load_plugins
from minisgl.plugins.measurements import read_measurements
from support.distributions import ROOT
from support.measured_cells import cell, write_measurements

FLASH, TRITON, TORCH = (
    "minisgl-attn-flashinfer:flashinfer",
    "minisgl-core:triton",
    "minisgl-core:torch",
)


def load_script():
    path = ROOT / "benchmarks" / "attention_ranks.py"
    spec = importlib.util.spec_from_file_location("attention_ranks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def test_ranks_are_those_of_the_run():
    for path, text in script.modules().items():
        assert path.read_text() == text, "run: python benchmarks/attention_ranks.py"


def test_figures_in_the_readme_of_fa_are_those_of_the_run():
    """The first of two that were measured twice is the published case."""
    cases = [
        "prefill:1x8192:32/8x128:p128", "prefill:1x8192:32/8x128:p16",
        "prefill:16x1024:16/8x128:p128", "decode:256x450-1350:16/8x128:p64",
        "decode:1x2048:16/8x128:p16",
    ]  # fmt: skip
    run = json.loads((ROOT / "benchmarks" / "results" / "attention-h200.json").read_text())
    rates: dict[tuple[str, str], float] = {}
    for one in run["cells"]:
        if one["rate"] is not None:
            rates.setdefault((one["case"], one["backend"]), one["rate"] / 1e12)
    lines = (ROOT / "minisgl-attn-fa" / "README.md").read_text().splitlines()
    first = lines.index("| | FlashAttention 4 | FlashInfer |") + 2
    for case, line in zip(cases, lines[first:], strict=False):
        decimals = 0 if case.startswith("prefill") else 2
        expected = [f"{rates[case, name]:.{decimals}f}" for name in ("minisgl-attn-fa:fa", FLASH)]
        assert line.split(" | ")[1:] == [expected[0], f"{expected[1]} |"], line


def test_each_of_our_backends_has_ranks():
    """A backend of a distribution here that the script does not know would keep stale ranks."""
    offers = {offer.qualified for offer in load_plugins().attention}
    assert offers <= {*script.BY_HAND, script.REFERENCE}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Two page sizes and heads; Triton is beaten in some of them, and beats torch."""
    cells = [
        cell(f"{phase}:{rows}x512:{heads}x128:p{size}", name, us)
        for phase in ("decode", "prefill") for rows in (1, 4)
        for heads in ("16/8", "40/8") for size in (16, 128)
        for name, us in (
            (FLASH, 10.0 * rows), (TRITON, 20.0 if size == 16 or phase == "prefill" else 5.0),
            (TORCH, 500.0),
        )
    ]  # fmt: skip
    path = write_measurements(tmp_path / "benchmarks" / "results" / "attention-h200.json", cells)
    monkeypatch.setattr(script, "FILE", path)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    return path


def ranks_in(text):
    found = {}
    exec(compile(text, "measured_ranks", "exec"), found)
    return found["RANKS"]


def test_a_run_becomes_tables_by_page_size_and_heads(run, tmp_path):
    texts = {path.relative_to(tmp_path).as_posix(): text for path, text in script.modules().items()}
    core = ranks_in(texts["minisgl-core/src/minisgl/plugins/measured_ranks.py"])
    flash = ranks_in(texts["minisgl-attn-flashinfer/src/minisgl_attn_flashinfer/measured_ranks.py"])
    assert set(core) == {"triton"}, "the reference has rank 0 by definition"
    source = "measured on NVIDIA H200, benchmarks/results/attention-h200.json, 2026-12-01"
    assert core["triton"].source == flash["flashinfer"].source == source
    # 10 and 40 us beside 20 and 20: halves and wholes, so 1 / sqrt(2) each.
    assert flash["flashinfer"].prefill == {
        (16, 2): 71, (16, 5): 71, (128, 2): 71, (128, 5): 71,
    }  # fmt: skip
    assert core["triton"].prefill_rank(16, 40, 8) == 71
    assert core["triton"].decode_rank(128, 16, 8) == 100


def test_what_a_run_does_not_have_keeps_its_ranks_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "benchmarks" / "results" / "attention-h200.json"
    monkeypatch.setattr(script, "FILE", path)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    name = tmp_path / "minisgl-attn-flashinfer/src/minisgl_attn_flashinfer/measured_ranks.py"
    by_hand = ranks_in(script.modules()[name])
    assert by_hand["flashinfer"].source.startswith("by hand")
    case = "prefill:1x512:16/8x128:p16"
    write_measurements(path, [cell(case, FLASH, 20.0), cell(case, TRITON, 10.0)])
    mixed = ranks_in(script.modules()[name])
    assert mixed["flashinfer"].prefill == {(16, 2): 0}
    assert mixed["flashinfer"].decode == by_hand["flashinfer"].decode
    assert mixed["flashinfer"].source.startswith("measured on NVIDIA H200, ")
    assert "; decode by hand" in mixed["flashinfer"].source
    assert mixed["trtllm"] == by_hand["trtllm"]


def test_what_core_s_own_kernels_beat_in_every_case_has_rank_0(run):
    tables = script.rank_tables(read_measurements(run))[FLASH]
    assert tables["decode"] == {(16, 2): 71, (16, 5): 71, (128, 2): 0, (128, 5): 0}


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_no_ranks_follow_from_a_run_in_which_anything_was_wrong(tmp_path, status):
    case = "decode:1x512:16/8x128:p16"
    path = write_measurements(
        tmp_path / "x.json", [cell(case, FLASH, 1.0, status), cell(case, TRITON, 9.0)]
    )
    with pytest.raises(ValueError, match=f"flashinfer {status} in decode:1x512"):
        script.rank_tables(read_measurements(path))
