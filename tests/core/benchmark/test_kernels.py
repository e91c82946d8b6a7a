"""``minisgl bench kernels``: cases, what is counted, and lines of the table, on a CPU."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minisgl.benchmark import attention_rig, timing
from minisgl.benchmark.attention_cases import PRESETS, parse_case
from minisgl.benchmark.attention_rig import AttentionRig, make_batch
from minisgl.benchmark.moe_cases import moe_cases, moe_shape
from minisgl.benchmark.op_cases import model_shape, op_cases
from minisgl.benchmark.published import write_config
from minisgl.benchmark.timing import num_copies
from minisgl.cli import main
from minisgl.errors import SettingsError, UnsupportedBackendError
from minisgl.kernel.ops import OpTable
from minisgl.plugins import AttentionBackendRecord, Capabilities, NoSettings, Supported, builtin
from minisgl.plugins.host import load_plugins
from minisgl.settings import Settings
from support.replays import ReplayableBackend

CPU = torch.device("cpu")
DECODE, PREFILL = "decode:4x5-30:4/2x16:p4", "prefill:2x7-12:4/2x16:p4"


@pytest.fixture
def tiny(tmp_path):
    """A folder whose ``config.json`` has a small shape of Qwen3."""
    file = write_config("Qwen3-0.6B", tmp_path / "Tiny")
    values = json.loads(file.read_text())
    values |= {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50,
    }  # fmt: skip
    file.write_text(json.dumps(values))
    return file.parent


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """A CPU's cache is larger than these tests want to fill."""
    for module in (attention_rig, __import__("minisgl.benchmark.op_cases", fromlist=["x"])):
        monkeypatch.setattr(module, "num_copies", lambda *_, **__: 2)
    monkeypatch.setattr(attention_rig, "_DECODE_LAYERS", 2)


def test_a_case_reads_as_it_is_written():
    for text in (*PRESETS.values(), DECODE, PREFILL):
        assert str(parse_case(text)) == text
    assert str(parse_case("decode-256")) == "decode:256x450-1350:16/8x128:p16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode-257", "known: decode-256-p1"),
        ("decode:0x5:4/2x16:p4", "at least 1"),
        ("decode:4x9-5:4/2x16:p4", "MIN is at most MAX"),
        ("decode:4x5:4/3x16:p4", "KV heads divide"),
        ("verify:4x5:4/2x16:p4", "is no case"),
        ("decode:1000000000x5:4/2x16:p4", "at most 65536 rows"),
        ("decode:1x2147483647+4:4/2x16:p4", "at most 65536 rows of 2147483647 tokens"),
        ("decode:1x5:4/2x100000:p4", "head dim and page size are at most 65536"),
    ],
)
def test_a_wrong_case_is_refused(text, message, capsys):
    with pytest.raises(SettingsError, match=message):
        parse_case(text)
    assert main(["bench", "kernels", "--cases", text]) == 2


def test_bytes_and_operations_of_a_case():
    decode = parse_case("decode:3x10:4/2x16:p4")
    assert decode.kv_bytes(2) == 3 * 10 * 2 * 2 * 16 * 2
    assert decode.flops() == 4 * 3 * 10 * 4 * 16
    # Query i sees i + 1 keys.
    prefill = parse_case("prefill:1x3:4/2x16:p4")
    assert prefill.flops() == 4 * (1 + 2 + 3) * 4 * 16


@pytest.mark.parametrize("text", [DECODE, PREFILL])
def test_a_batch_has_rows_of_their_own_scattered_pages(text):
    case = parse_case(text)
    batch = make_batch(case, CPU)
    kv_lens = case.kv_lens()
    assert kv_lens.min() >= case.lengths[0]
    assert kv_lens.max() <= case.lengths[1]
    counts = -(-kv_lens // case.page_size)
    used = np.concatenate([batch.page_table[r, :n].numpy() for r, n in enumerate(counts)])
    assert sorted(used) == list(range(1, int(counts.sum()) + 1)), "each page once, never page 0"
    assert list(used) != sorted(used)
    assert len(set(batch.slots.tolist())) == batch.num_tokens
    if case.phase == "decode":
        assert batch.num_decode_rows == batch.num_rows == batch.num_tokens == 4
        assert batch.positions.tolist() == (kv_lens - 1).tolist()
    else:
        assert batch.num_decode_rows == 0
        assert batch.num_tokens == kv_lens.sum()
    first = int(batch.positions[-1]) // case.page_size
    page = int(batch.page_table[-1, first])
    assert int(batch.slots[-1]) == page * case.page_size + int(batch.positions[-1]) % case.page_size


@pytest.mark.parametrize("text", [DECODE, PREFILL])
def test_a_backend_attends_to_the_rows_of_the_case(text):
    """Catches: a batch that the backend reads otherwise than it was meant."""
    case = parse_case(text)
    rig = AttentionRig(case, load_plugins(), Settings(), CPU, torch.float32)
    check_last_token(rig, case, rig.attend(rig.create("torch")))


def test_a_launch_for_graphs_is_planned_as_one(monkeypatch):
    """Catches: a graph whose plan, head or lengths are missing or those of another launch."""
    moments = []

    class Watched(ReplayableBackend):
        def prepare_capture(self, batch):
            moments.append("capture")
            return super().prepare_capture(batch)

        def enqueue(self, batch, plan):
            moments.append("head")
            super().enqueue(batch, plan)

        def prepare_replay(self, plan, kv_lens, slot):
            moments.append("replay")
            super().prepare_replay(plan, kv_lens, slot)

    monkeypatch.setattr("minisgl.attention.torch_backend.TorchAttentionBackend", Watched)
    for text, expected in ((DECODE, ["capture", "replay", "head"]), (PREFILL, [])):
        case = parse_case(text)
        moments.clear()
        rig = AttentionRig(case, load_plugins(), Settings(), CPU, torch.float32)
        check_last_token(rig, case, rig.attend(rig.create("torch")))
        assert moments == expected
        assert rig.time("torch", 0.001).seconds > 0


def check_last_token(rig, case, out):
    """Compare the last token's output with attention written out."""
    k_pool, v_pool = (tensor.flatten(0, 1) for tensor in rig._pool.layer(0))
    last = rig.batch.num_tokens - 1
    length = int(case.kv_lens()[-1])
    pages = rig.batch.page_table[-1].long()
    slots = [
        int(pages[i // case.page_size]) * case.page_size + i % case.page_size for i in range(length)
    ]
    for head in range(case.num_q_heads):
        k, v = k_pool[slots, head // 2], v_pool[slots, head // 2]
        weights = (k @ rig._q[last, head] * case.head_dim**-0.5).softmax(0)
        torch.testing.assert_close(out[last, head], weights @ v, rtol=1e-4, atol=1e-5)


def test_operations_of_a_model_run_and_are_counted(tiny):
    shape = model_shape(str(tiny))
    assert (shape.name, shape.hidden, shape.head_dim, shape.qk_norm) == ("Tiny", 32, 8, True)
    cases = {(c.op, c.label, c.rows): c for c in op_cases(shape, (3, 2000), CPU, torch.float32)}
    table = OpTable()
    for case in cases.values():
        if hasattr(table, case.op):
            case.inputs(getattr(table, case.op))()
    assert cases["rms_norm", "", 3].amount == 2 * 3 * 32 * 4
    assert cases["silu_and_mul", "", 3].amount == 3 * 3 * 48 * 4
    assert cases["rope", "", 3].amount == 2 * 3 * (4 + 2) * 8 * 4
    assert cases["store_kv", "", 3].amount == 4 * 3 * 2 * 8 * 4
    assert cases["rope_store", "", 3].amount == 2 * 3 * (4 + 2 * 2) * 8 * 4
    qkv = cases["linear", "qkv", 3]
    assert (qkv.kind, qkv.amount) == ("bytes", (3 * 32 + 32 * 64 + 3 * 64) * 4)
    many = cases["linear", "qkv", 2000]
    assert (many.kind, many.amount) == ("flops", 2 * 2000 * 32 * 64)
    assert cases["sample_gumbel", "", 3].amount == 3 * 50 * 4
    assert ("linear", "head", 3) in cases
    assert ("linear", "head", 2000) not in cases, "the head runs on sampled rows only"
    assert ("sample_gumbel", "", 2000) not in cases


def test_a_published_name_is_a_shape_and_another_is_refused(tmp_path):
    assert model_shape("Qwen3-14B").num_q_heads == 40
    assert model_shape("Llama-3.1-8B").head_dim == 128
    with pytest.raises(SettingsError, match=r"Nearest: 'Qwen3-14B'\. A folder with a config"):
        model_shape("Qwen3-14")
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(SettingsError, match="has no intermediate_size"):
        model_shape(str(tmp_path))
    for text, message in (
        ("{", "cannot be read: Expecting property name"),
        ("[]", "must hold a JSON object, found list"),
        ('{"hidden_size": "x", "intermediate_size": 5, "num_attention_heads": 2}', "no configurat"),
        ('{"hidden_size": 8, "intermediate_size": 5, "num_attention_heads": 0}', "no configuratio"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SettingsError, match=message):
            model_shape(str(tmp_path))


def test_the_command_prints_lines_and_writes_all(tiny, tmp_path, capsys):
    path = tmp_path / "out.json"
    line = ["bench", "kernels", "--quick", "--cases", f"{DECODE},{PREFILL}", "--rows", "2"]
    line += ["--model", str(tiny), "--log-level", "error", "--commit", "abc", "--json", str(path)]
    line += ["--backends", "torch"]  # others may be installed beside it
    assert main(line) == 0
    record = json.loads(path.read_text())
    assert [(one["case"], one["implementation"]) for one in record["attention"]] == [
        (DECODE, "torch"),
        (PREFILL, "torch"),
    ]
    ceilings = record["ceilings"]
    for one, kind in zip(record["attention"], ("bytes", "flops"), strict=True):
        ceiling = ceilings["read_bytes_per_s" if kind == "bytes" else "flops_per_s"]
        assert one["kind"] == kind
        assert one["us"] > 0
        assert one["fraction"] == pytest.approx(one["rate"] / ceiling)
    assert record["attention"][0]["rate"] == pytest.approx(
        parse_case(DECODE).kv_bytes(4) / record["attention"][0]["us"] * 1e6
    )
    ops = {(one["case"], one["implementation"]) for one in record["ops"]}
    assert {("rms_norm:2", "reference"), ("linear.qkv:2", "reference")} <= ops
    assert ("linear.qkv:2", "onednn") in ops, "each implementation that can run here has a line"
    assert record["commit"] == "abc"
    text = capsys.readouterr().out
    assert "GB/s (a reduction)" in text
    assert "linear.head:2" in text


@pytest.fixture
def experts(tmp_path):
    """A folder whose ``config.json`` has a small shape of Qwen3-MoE."""
    file = write_config("Qwen3-30B-A3B", tmp_path / "Experts")
    values = json.loads(file.read_text())
    values |= {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_experts": 8,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    file.write_text(json.dumps(values))
    return file.parent


def test_experts_are_measured_by_weights_or_operations(experts, tmp_path, capsys):
    path = tmp_path / "out.json"
    line = ["bench", "kernels", "--quick", "--only", "moe", "--model", str(experts)]
    line += ["--rows", "1,30", "--log-level", "error", "--json", str(path)]
    assert main(line) == 0
    record = json.loads(path.read_text())
    assert record["attention"] == record["ops"] == []
    found = {one["case"]: one for one in record["moe"] if one["implementation"] == "torch"}
    assert list(found) == ["moe:1", "moe:30"]
    assert all(one["us"] > 0 for one in found.values())
    assert "routed experts at the shapes of Experts" in capsys.readouterr().out


def test_bytes_and_operations_of_experts(experts):
    shape = moe_shape(str(experts), load_plugins())
    assert shape is not None
    few, many = moe_cases(shape, (1, 500), CPU, torch.float32)
    one_expert = 3 * 32 * 16 * 4
    assert few.num_bytes == 2 * one_expert, "a token's experts are different ones"
    assert many.num_bytes == 8 * one_expert, "so many tokens choose all of them"
    assert many.flops == 500 * 2 * 3 * 2 * 32 * 16
    assert len(few.inputs) > 1
    assert moe_shape("Qwen3-0.6B", load_plugins()) is None


def test_quantized_experts_are_measured_and_count_a_byte_a_weight(experts, tmp_path, capsys):
    path = tmp_path / "out.json"
    line = ["bench", "kernels", "--quick", "--model", str(experts), "--log-level", "error"]
    line += ["--quantization", "fp8"]
    assert main([*line, "--only", "moe", "--rows", "3", "--json", str(path)]) == 0
    (measured,) = (
        one for one in json.loads(path.read_text())["moe"] if one["implementation"] == "torch"
    )
    assert measured["us"] > 0
    assert main([*line, "--only", "ops"]) == 2
    assert "moe.weights_dtype='fp8' is about routed experts" in capsys.readouterr().err
    shape = moe_shape(str(experts), load_plugins())
    assert shape is not None
    (case,) = moe_cases(shape, (1,), CPU, torch.float32, torch.float8_e4m3fn)
    assert case.num_bytes == 2 * (3 * 32 * 16 + 4 * (2 * 16 + 32))
    assert {stack.dtype for stack in case.inputs[0][2:]} == {torch.float8_e4m3fn}


def test_tokens_that_do_not_fit_into_memory_end_the_lines_of_experts(experts, tmp_path, capsys):
    path = tmp_path / "out.json"
    line = ["bench", "kernels", "--quick", "--only", "moe", "--model", str(experts)]
    assert (
        main([*line, "--rows", "1,99999999999", "--log-level", "error", "--json", str(path)]) == 0
    )
    *measured, last = json.loads(path.read_text())["moe"]
    assert {one["case"] for one in measured if one["us"] is not None} == {"moe:1"}
    assert "need more memory than there is" in last["reason"]
    assert last["reason"] in capsys.readouterr().out


def test_one_moe_backend_alone_is_measured(experts, tmp_path, capsys):
    """Catches: ``moe.backend`` passed over; a backend that cannot run here passed over, too."""
    path = tmp_path / "out.json"
    line = ["bench", "kernels", "--quick", "--only", "moe", "--model", str(experts)]
    line += ["--rows", "1", "--log-level", "error", "--json", str(path)]
    assert main([*line, "--moe-backend", "torch"]) == 0
    (measured,) = json.loads(path.read_text())["moe"]
    assert (measured["implementation"], measured["reason"]) == ("torch", "")
    assert main([*line, "--moe-backend", "toch"]) == 3
    assert "moe.backend='toch'" in capsys.readouterr().err


def test_a_moe_backend_that_cannot_run_here_is_named_with_the_reason(experts, tmp_path):
    if all(offer.name != "triton" for offer in load_plugins().moe):
        pytest.skip("minisgl-moe-triton is not installed")
    path = tmp_path / "out.json"
    line = ["bench", "kernels", "--quick", "--only", "moe", "--model", str(experts)]
    line += ["--rows", "1", "--log-level", "error", "--json", str(path), "--device", "cpu"]
    assert main([*line, "--moe-backend", "triton"]) == 0
    (refused,) = json.loads(path.read_text())["moe"]
    assert (refused["implementation"], refused["us"]) == ("triton", None)
    assert refused["reason"]
    assert main(line) == 0
    assert refused in json.loads(path.read_text())["moe"]


def test_a_dense_model_has_no_experts_to_measure(tiny, capsys):
    line = ["bench", "kernels", "--quick", "--only", "moe", "--model", str(tiny)]
    assert main([*line, "--log-level", "error"]) == 2
    assert "name a model that has" in capsys.readouterr().err


@pytest.fixture
def second_backend(monkeypatch):
    """Offer backends that refuse, and that break."""

    def offer(name, create, **capabilities):
        return AttentionBackendRecord(
            name=name, summary="x", settings_type=NoSettings, create=create,
            probe=lambda query: Supported(prefill_rank=1, decode_rank=1),
            capabilities=Capabilities(**capabilities),
        )  # fmt: skip

    def breaks(context, settings):
        raise RuntimeError("no kernel image\nand more")

    real = builtin.minisgl_attention_backends

    def offers():
        return [*real(), offer("narrow", breaks, page_sizes=(64,)), offer("broken", breaks)]

    offers.__dict__.update(real.__dict__)
    monkeypatch.setattr(builtin, "minisgl_attention_backends", offers)


@pytest.mark.usefixtures("second_backend")
def test_a_backend_that_cannot_run_says_why_and_the_others_are_measured(tmp_path, capsys):
    path = tmp_path / "out.json"
    line = ["bench", "kernels", "--quick", "--only", "attention", "--cases", DECODE]
    assert main([*line, "--log-level", "error", "--json", str(path)]) == 0
    found = {one["implementation"]: one for one in json.loads(path.read_text())["attention"]}
    assert found["torch"]["us"] > 0
    assert found["narrow"]["us"] is None
    assert "needs page size 64, found 4" in found["narrow"]["reason"]
    assert found["broken"]["reason"] == "RuntimeError: no kernel image"
    assert "no kernel image" in capsys.readouterr().out
    rig = AttentionRig(parse_case(DECODE), load_plugins(), Settings(), CPU, torch.float32)
    with pytest.raises(UnsupportedBackendError):
        rig.create("narrow")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "ops", "--backends", "torch"], "--backends is about attention"),
        (["--only", "moe", "--cases", DECODE], "--cases is about attention"),
        (["--only", "attention", "--rows", "4"], "--rows is about operations and experts"),
    ],
)
def test_flags_of_what_only_leaves_out_are_refused(words, message, capsys):
    assert main(["bench", "kernels", "--quick", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cases", DECODE, "--backends", "torhc"], "Nearest: 'torch'"),
        (["--attention", "--cases", DECODE, "--backends", "torhc"], "Nearest: 'torch'"),
        (["--cases", "decode-257"], "'decode-257' is no case"),
        (["--attention", "--cases", "decode-257"], "'decode-257' is no case"),
        (["--attention", "--models", "Qwen3-14"], "Nearest: 'Qwen3-14B'"),
        (["--attention", "--prompts", "1x9999999999"], "at most 65536 rows of"),
        (["--model", "Qwen3-14"], "Nearest: 'Qwen3-14B'"),
        (["--only", "moe", "--model", "Qwen3-0.6B"], "name a model that has"),
        (["--only", "moe", "--set", "backend_options.torhc.x=1"], "backend_options.torhc"),
        (["--only", "ops", "--set", "backend_options.torch.x=1"], "backend_options.torch.x"),
        (["--set", "cache.pool=pagde"], "cache.pool='pagde' is not installed"),
        (
            ["--attention", "--backends", "torch", "--set", "cache.pool=pagde"],
            "cache.pool='pagde' is not installed",
        ),
        (["--device", "tpu"], "tpu"),
        (["--attention", "--quantization", "fp8"], "--attention measures none; leave it at auto"),
        (["--only", "ops", "--quantization", "fp8"], "--only ops measures none; leave it at auto"),
        (["--quantization", "fp8"], "Qwen3-0.6B has none that an installed plugin runs"),
    ],
)
def test_what_was_typed_is_checked_before_anything_is_measured(words, message, capsys, monkeypatch):
    """Ceilings take seconds, and cases before a wrong one take minutes."""

    def measured(*_, **__):
        pytest.fail("the ceilings were measured first")

    monkeypatch.setattr(timing, "measure_ceilings", measured)
    assert main(["bench", "kernels", "--quick", *words]) in {2, 3}
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_the_time_of_a_call_is_shared_among_all(monkeypatch):
    """Each call takes two seconds of a clock that stands still otherwise."""
    seen = []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: 2.0 * len(seen)))
    calls = [lambda: seen.append(1), lambda: seen.append(2)]
    found = timing.time_calls(calls, CPU, graph=True, shortest_s=20.0)
    assert found.clock == "clock"
    assert found.seconds == 2
    assert seen.count(1) == seen.count(2) > 5


def test_copies_fill_more_than_the_cache():
    each = 16 * 2**20
    assert num_copies(each, CPU) * each >= 4 * 64 * 2**20
    assert num_copies(2**40, CPU) == 2
    assert num_copies(0, CPU, most=64) == 64
