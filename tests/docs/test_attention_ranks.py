"""Ranks in the records of our plugins are those of the run that is kept in benchmarks/results."""

import importlib.util

import pytest

from minisgl.plugins import measured_ranks
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
    expected = script.modules()
    for path, text in expected.items():
        assert path.read_text() == text, "run: python benchmarks/attention_ranks.py"
    assert bool(expected) == measured_ranks.SOURCE.startswith("measured on "), (
        "a source names a run, and is that of one that is there"
    )


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
    return found


def test_a_run_becomes_tables_by_page_size_and_heads(run, tmp_path):
    texts = {path.relative_to(tmp_path).as_posix(): text for path, text in script.modules().items()}
    assert set(texts) == {
        "minisgl-core/src/minisgl/plugins/measured_ranks.py",
        "minisgl-attn-flashinfer/src/minisgl_attn_flashinfer/measured_ranks.py",
    }
    core, flash = (ranks_in(texts[name]) for name in sorted(texts, reverse=True))
    source = "measured on NVIDIA H200, benchmarks/results/attention-h200.json, 2026-12-01"
    assert core["SOURCE"] == flash["SOURCE"] == source
    assert set(core["RANKS"]) == {"triton"}, "the reference has rank 0 by definition"
    assert flash["RANKS"]["flashinfer"].source == source
    # 10 and 40 us beside 20 and 20: halves and wholes, so 1 / sqrt(2) each.
    assert flash["RANKS"]["flashinfer"].prefill == {
        (16, 2): 71, (16, 5): 71, (128, 2): 71, (128, 5): 71,
    }  # fmt: skip
    assert core["RANKS"]["triton"].prefill_rank(16, 40, 8) == 71
    assert core["RANKS"]["triton"].decode_rank(128, 16, 8) == 100


def test_what_core_s_own_kernels_beat_in_every_case_has_rank_0(run):
    tables = script.rank_tables(read_measurements(run))[FLASH]
    assert tables["decode"] == {(16, 2): 71, (16, 5): 71, (128, 2): 0, (128, 5): 0}


def test_what_was_wrong_gets_no_rank(tmp_path):
    case = "decode:1x512:16/8x128:p16"
    path = write_measurements(
        tmp_path / "x.json", [cell(case, FLASH, 1.0, "wrong"), cell(case, TRITON, 9.0)]
    )
    assert list(script.rank_tables(read_measurements(path))) == [TRITON]
