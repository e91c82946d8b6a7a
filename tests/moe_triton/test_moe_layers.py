"""``benchmarks/moe_layers.py``: what ours is timed beside computes the same."""

import json
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from minisgl.benchmark.moe_cases import MoeShape
from minisgl.benchmark.published import write_config
from minisgl.benchmark.timing import Timing
from minisgl.errors import SettingsError
from minisgl_moe_triton.kernels.routing import route
from support.distributions import ROOT

TILES = {
    "1": {
        "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 2,
        "num_warps": 4, "num_stages": 2,
    },
    "64": {
        "BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1,
        "num_warps": 4, "num_stages": 2,
    },
}  # fmt: skip


@pytest.fixture
def program() -> ModuleType:
    spec = spec_from_file_location("moe_layers", ROOT / "benchmarks" / "moe_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens", [1, 50])
def test_the_published_scheme_computes_what_ours_does(program, tokens):
    shape = MoeShape(
        num_experts=6, top_k=2, hidden_size=80, intermediate_size=48, activation="silu",
        renormalize=True,
    )  # fmt: skip
    hidden = torch.randn(tokens, 80, dtype=torch.float16)
    weights, experts = route(torch.randn(tokens, 6), 2, renormalize=True)
    gate_up = torch.randn(6, 96, 80, dtype=torch.float16) * 80**-0.5
    down = torch.randn(6, 80, 48, dtype=torch.float16) * 48**-0.5
    out = program.PublishedScheme(TILES)(hidden, weights, experts, gate_up, down)
    context = shape.context(torch.device("cpu"), torch.float16, 64)
    ours = program.create_backend(context, program.TritonMoeSettings())
    right = ours.run_experts(hidden, weights, experts, gate_up, down)
    torch.testing.assert_close(out, right, rtol=1e-2, atol=1e-2)


@pytest.fixture
def small(tmp_path, program, monkeypatch):
    """A folder with a small shape of Qwen3-MoE, and launches that take a millisecond."""
    file = write_config("Qwen3-30B-A3B", tmp_path / "Small")
    values = json.loads(file.read_text())
    values |= {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 50,
        "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    file.write_text(json.dumps(values))

    def once(calls, device, *, graph):
        calls[0]()
        return Timing((1e-3,), "clock")

    monkeypatch.setattr(program, "time_calls", once)
    return file.parent


def test_it_writes_a_line_for_each_number_of_tokens(program, small, tmp_path, monkeypatch, capsys):
    tiles, out = tmp_path / "tiles.json", tmp_path / "out.json"
    tiles.write_text(json.dumps(TILES))

    words = ["--model", str(small), "--tokens", "1,9", "--published", str(tiles)]
    words += ["--device", "cpu", "--json", str(out), "--commit", "abc"]
    monkeypatch.setattr("sys.argv", ["moe_layers.py", *words])
    program.main()
    few, sorted_ones = json.loads(out.read_text())["lines"]
    assert (few["tokens"], sorted_ones["tokens"]) == (1, 9)
    assert list(few["stages_us"]) == ["route", "gate_up", "down"]
    assert list(sorted_ones["stages_us"]) == ["route", "sort", "gate_up", "down", "sum"]
    for line in (few, sorted_ones):
        assert line["us"] == pytest.approx(1000)
        assert line["others"]["published"]["error"] < 3e-2
    assert "published" in capsys.readouterr().out


# What nobody chose is quantized when launches are compiled, as it lies in memory.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN)")
def test_experts_in_fp8_are_beside_the_torch_backend(program, small, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    words = ["--model", str(small), "--tokens", "1,9", "--weights-dtype", "fp8"]
    words += ["--device", "cpu", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["moe_layers.py", *words])
    program.main()
    record = json.loads(out.read_text())
    few, sorted_ones = record["lines"]
    assert record["weights_dtype"] == "fp8"
    assert list(few["stages_us"]) == ["route", "gate_up", "down"]
    assert list(sorted_ones["stages_us"]) == [
        "route", "quantize", "sort", "gate_up", "quantize_inner", "down", "sum",
    ]  # fmt: skip
    for line in (few, sorted_ones):
        assert line["others"] == {}
        assert 0 < line["error"] < 6e-2, "the interpreter cuts bfloat16 off"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--device", "cpu", "--weights-dtype", "fp8", "--published", "TILES"],
            "leave it or --weights-dtype out",
        ),
        ([], "needs an NVIDIA GPU"),
        (["--model", "Mixtral", "--device", "cpu"], "Nearest: 'Mixtral-8x7B'"),
        (["--model", "Qwen3-0.6B", "--device", "cpu"], "has no routed experts"),
        (["--tokens", "1,x"], "argument --tokens: a number of at least 1 is needed, got 'x'"),
        (["--device", "cpu", "--json", "/nowhere/x.json"], "--json '/nowhere/x.json' must be"),
        (["--device", "cpu", "--published", "/nowhere"], "--published '/nowhere' holds no tiles"),
    ],
)
def test_it_says_what_it_lacks(program, words, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("sys.argv", ["moe_layers.py", *words])
    with pytest.raises(SystemExit):
        program.main()
    assert message in capsys.readouterr().err


def test_without_a_card_it_needs_the_interpreter(program, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("sys.argv", ["moe_layers.py", "--device", "cpu"])
    with pytest.raises(SystemExit):
        program.main()
    assert (
        "--device cpu: Triton runs there with TRITON_INTERPRET=1 alone" in capsys.readouterr().err
    )


def test_a_spoilt_tuned_file_is_no_traceback(program, small, tmp_path, monkeypatch, capsys):
    words = ["--model", str(small), "--tokens", "1", "--device", "cpu", "--weights-dtype", "fp8"]
    monkeypatch.setattr("sys.argv", ["moe_layers.py", *words, "--tuned-folder", str(tmp_path)])
    monkeypatch.setattr("minisgl_moe_triton.create.find_tuned", _spoilt)
    with pytest.raises(SystemExit):
        program.main()
    assert "x.json is no file of tuned MoE launches" in capsys.readouterr().err


def _spoilt(*_):
    raise SettingsError("x.json is no file of tuned MoE launches")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a folder for the results"),
        (["tunes"], "'tunes' is none of all, test, tune, layers, serve"),
        (["all", "fp9"], "'fp9' is none of auto, fp8"),
    ],
)
def test_words_that_the_script_does_not_know_end_it(words, message, tmp_path):
    out = tmp_path / "out"
    line = ["bash", str(ROOT / "benchmarks" / "moe_on_card.sh"), *([str(out)] if words else [])]
    done = subprocess.run([*line, *words], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert message in done.stderr
    assert not out.exists()
