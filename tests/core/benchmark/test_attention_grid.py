"""``minisgl bench kernels --attention``: the grid, its cells, and what is right and wrong."""

import json
from dataclasses import replace

import pytest
import torch

from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.benchmark import attention_cells, attention_rig
from minisgl.benchmark.attention_cases import parse_case
from minisgl.benchmark.attention_grid import (
    MODELS,
    PUBLISHED,
    Prompts,
    default_grid,
    heads_of,
    parse_prompts,
)
from minisgl.benchmark.attention_rig import (
    AttentionRig,
    attend_exactly,
    count_layers,
    count_pages,
    make_batch,
    sample_tokens,
)
from minisgl.cli import main
from minisgl.cli.bench import output
from minisgl.engine import memory_plan
from minisgl.engine.memory_plan import DeviceMemory
from minisgl.errors import SettingsError
from minisgl.plugins import AttentionBackendRecord, Capabilities, NoSettings, Supported, builtin
from minisgl.plugins.host import load_plugins
from minisgl.settings import Settings
from support.measured_cells import cell, write_measurements

CPU = torch.device("cpu")
DECODE, PREFILL = "decode:4x5-30:4/2x16:p4", "prefill:2x7-12+9:4/2x16:p4"
SHARED = "decode:3x2-9+8:4/2x16:p4"
COMMAND = ("bench", "kernels", "--attention", "--quick", "--log-level", "error")


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """A CPU's cache is larger than these tests want to fill."""
    monkeypatch.setattr(attention_rig, "num_copies", lambda *_, **__: 2)
    monkeypatch.setattr(attention_rig, "_DECODE_LAYERS", 2)


class _Twice(TorchAttentionBackend):
    def attend(self, q, layer, plan, new_kv=None):
        return super().attend(q, layer, plan, new_kv) * (1 + layer.index)


class _NotANumber(TorchAttentionBackend):
    def attend(self, q, layer, plan, new_kv=None):
        out = super().attend(q, layer, plan, new_kv).clone()
        out[1, 0, 0] = float("nan")
        return out


def _breaks(context):
    raise RuntimeError("no kernel image\nand more")


@pytest.fixture
def backends(monkeypatch):
    """Offer a backend whose second layer is wrong, one with a hole, a narrow and a broken one."""

    def offer(name, backend, rank=1, **capabilities):
        return AttentionBackendRecord(
            name=name, summary="x", settings_type=NoSettings,
            create=lambda context, _: backend(context),
            probe=lambda query: Supported(prefill_rank=1, decode_rank=rank),
            capabilities=Capabilities(**capabilities),
        )  # fmt: skip

    real = builtin.minisgl_attention_backends

    def offers():
        return [
            *real(),
            offer("twice", _Twice),
            offer("hole", _NotANumber),
            offer("narrow", _breaks, page_sizes=(64,)),
            offer("broken", _breaks),
            offer("slow", TorchAttentionBackend, rank=0, page_sizes=(4,)),
        ]

    offers.__dict__.update(real.__dict__)
    monkeypatch.setattr(builtin, "minisgl_attention_backends", offers)


def run(tmp_path, *words):
    path = tmp_path / "out.json"
    assert main([*COMMAND, "--json", str(path), *words]) == 0
    return json.loads(path.read_text())


def test_the_default_grid_of_a_card_has_every_case_once():
    grid = default_grid(torch.device("cuda"))
    cases = [str(case) for part, case in grid.cases() if part == "grid"]
    assert len(cases) == len(set(cases)) == (5 * 4 + 7) * 3 * 4
    for text in (
        "decode:256x16384-49152:40/8x128:p16", "decode:1x512:32/8x128:p64",
        "prefill:1x512+8192:32/4x128:p128", "prefill:16x1024:16/8x128:p64",
    ):  # fmt: skip
        assert text in cases
    published = [str(case) for part, case in grid.cases() if part == "published"]
    assert published[0] == "decode:256x450-1350:16/8x128:p16"
    assert len(published) == 3 * len(PUBLISHED)


def test_flags_narrow_the_grid():
    grid = replace(
        default_grid(torch.device("cuda")), phases=("prefill",), prompts=(Prompts(1, 512),),
        page_sizes=(32,), models=heads_of(["Qwen3-14B", "Qwen3-32B"]), published=False,
    )  # fmt: skip
    assert [str(case) for _, case in grid.cases()] == [
        "prefill:1x512:40/8x128:p32", "prefill:1x512:64/8x128:p32",
    ]  # fmt: skip


def test_any_page_size_can_be_measured():
    grid = replace(default_grid(torch.device("cuda")), page_sizes=(48,))
    cases = [str(case) for _, case in grid.cases()]
    assert "prefill:1x512+8192:16/8x128:p48" in cases
    assert "decode:64x8448:16/8x128:p48" in cases
    assert "decode:64x256+8192:16/8x128:p48" not in cases, "48 does not divide what is shared"


def test_models_of_equal_heads_are_measured_once():
    assert list(map(str, heads_of(MODELS).values())) == [
        "16/8x128", "40/8x128", "32/4x128", "32/8x128",
    ]  # fmt: skip
    grid = replace(default_grid(CPU), models=heads_of(["Qwen3-0.6B", "Qwen3-1.7B"]))
    assert len(grid.cases()) == len(default_grid(CPU).cases())


def test_prompts_read_as_they_are_written():
    assert parse_prompts("4x2048") == Prompts(4, 2048)
    assert str(parse_prompts("1x512+8192")) == "1x512+8192"
    for text in ("4", "0x5", "4x0", "4x5+", "4x5-6"):
        with pytest.raises(SettingsError, match="write ROWSxTOKENS"):
            parse_prompts(text)


def test_tokens_before_a_prefill_are_attended_to_and_not_computed():
    case = parse_case("prefill:2x3+8:4/2x16:p4")  # also of other lengths than whole pages
    uneven = make_batch(parse_case("prefill:2x3+6:4/2x16:p4"), CPU)
    assert uneven.positions.tolist() == [6, 7, 8] * 2
    assert len(set(uneven.page_table.flatten().tolist())) == 6
    assert case.flops() == 2 * 4 * (9 + 10 + 11) * 4 * 16
    assert case.kv_bytes(2) == 2 * 11 * 2 * 2 * 16 * 2
    batch = make_batch(case, CPU)
    assert batch.query_lens.tolist() == [3, 3]
    assert batch.kv_lens.tolist() == [11, 11]
    assert batch.positions.tolist() == [8, 9, 10] * 2
    assert len(set(batch.page_table.flatten().tolist())) == count_pages(case) == 6


def test_decode_rows_share_the_pages_of_their_prefix():
    case = parse_case(SHARED)
    batch = make_batch(case, CPU)
    table = batch.page_table.tolist()
    assert table[0][:2] == table[1][:2] == table[2][:2]
    own = -(-case.own_lens() // 4)
    others = [page for row, count in zip(table, own, strict=True) for page in row[2 : 2 + count]]
    assert sorted(others + table[0][:2]) == list(range(1, count_pages(case) + 1))
    assert case.kv_bytes(2) == 2 * (8 + int(case.own_lens().sum())) * 2 * 16 * 2
    assert batch.kv_lens.tolist() == (case.own_lens() + 8).tolist()
    with pytest.raises(
        SettingsError, match="rows share whole pages; 7 tokens are no multiple of 4"
    ):
        parse_case("decode:3x2-9+7:4/2x16:p4")


@pytest.mark.parametrize("text", [DECODE, PREFILL, SHARED])
def test_exact_attention_is_that_of_the_reference(text):
    """Catches: a check that compares with something else than attention."""
    rig = AttentionRig(parse_case(text), load_plugins(), Settings(), CPU, torch.float32)
    found = rig.run("torch", 0.001)
    assert rig.largest_error(found) < 1e-5
    k_pool, v_pool = (one.flatten(0, 1) for one in rig._pool.layer(1))
    token = rig.batch.num_tokens - 1
    seen = torch.arange(int(rig.batch.positions[token]) + 1)
    slots = rig.batch.page_table[-1].long()[seen // 4] * 4 + seen % 4
    for head in range(4):
        scores = (k_pool[slots, head // 2] @ rig._q[token, head]) * 16**-0.5
        expected = scores.softmax(0) @ v_pool[slots, head // 2]
        exact = attend_exactly(rig._q, rig._pool.layer(1), rig.batch, [token])[0, head]
        torch.testing.assert_close(exact.float(), expected, rtol=1e-4, atol=1e-5)


def test_a_pool_has_layers_enough_to_leave_the_cache(monkeypatch):
    monkeypatch.undo()
    each = {
        text: (count_layers(case, CPU, torch.bfloat16), case.kv_bytes(2))
        for text in (
            "decode:1x512:16/8x128:p16", "decode:1x32768:16/8x128:p16",
            "decode:256x8192:16/8x128:p16", "prefill:1x512:16/8x128:p16",
            "prefill:16x8192:16/8x128:p16",
        )
        for case in [parse_case(text)]
    }  # fmt: skip
    layers = [found for found, _ in each.values()]
    assert layers == [64, 8, 2, 4, 2]
    assert all(found * size > 64 * 2**20 for found, size in list(each.values())[:3])


def test_the_first_and_the_last_token_are_always_compared():
    assert sample_tokens(1) == [0]
    assert sample_tokens(3) == [0, 1, 2]
    found = sample_tokens(10_000)
    assert (found[0], found[-1], len(found)) == (0, 9_999, 8)


@pytest.mark.usefixtures("backends")
def test_each_backend_gets_a_cell_whatever_becomes_of_it(tmp_path, capsys):
    record = run(
        tmp_path, "--cases", f"{DECODE},{PREFILL}", "--backends", "torch,twice,hole,narrow,broken"
    )
    for case in (DECODE, PREFILL):
        cells = {
            one["backend"].partition(":")[2]: one for one in record["cells"] if one["case"] == case
        }
        assert {name: one["status"] for name, one in cells.items()} == {
            "torch": "ok", "twice": "wrong", "hole": "wrong", "narrow": "refused",
            "broken": "failed",
        }  # fmt: skip
        assert cells["torch"]["error"] < 1e-5
        assert len(cells["torch"]["times_us"]) == 5
        assert cells["twice"]["error"] == pytest.approx(1, abs=1e-3)
        assert cells["hole"]["reason"] == "its output is not all numbers"
        assert cells["narrow"]["reason"] == "needs page size 64, found 4"
        assert cells["broken"]["reason"] == "RuntimeError: no kernel image"
    ok = record["cells"][0]
    amount = parse_case(DECODE).kv_bytes(4)
    assert ok["rate"] == pytest.approx(amount / ok["us"] * 1e6, rel=1e-3)
    most = record["ceilings"]["read_bytes_per_s"]
    assert ok["fraction"] == pytest.approx(ok["rate"] / most, abs=1e-4)
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("dec", "pre"))}
    assert lines[DECODE].count("*") == 1, "only a right result can be the fastest"
    assert lines[DECODE].count("WRONG") == 2
    assert lines[DECODE].split()[-2:] == ["refused", "failed"]
    assert f"narrow: refused: needs page size 64, found 4 ({DECODE} and 1 more)" in text


@pytest.mark.usefixtures("backends")
def test_the_reference_is_left_to_those_who_name_it(tmp_path):
    """On a machine where others run; its rank, not its name, tells which one it is."""
    record = run(tmp_path, "--cases", DECODE)
    names = {one["backend"].partition(":")[2] for one in record["cells"]}
    assert names == {"broken", "hole", "twice"}
    assert record["refused"]["minisgl-core:narrow"] == "needs page size 64, found 4"


@pytest.mark.usefixtures("backends")
def test_what_has_rank_0_for_a_case_is_left_to_those_who_name_it(tmp_path, capsys):
    """A plugin ranks so what compiles for minutes, and what is never the fastest."""

    def statuses(*words):
        cells = run(tmp_path, "--cases", f"{DECODE},{PREFILL}", *words)["cells"]
        return [one["status"] for one in cells if one["backend"].endswith(":slow")]

    assert statuses() == ["skipped", "ok"]
    assert "slow: skipped: it has rank 0 here, so that no engine tries it" in (
        capsys.readouterr().out
    )
    assert statuses("--backends", "slow,twice") == ["ok", "ok"]
    assert statuses("--backends", "slow") == ["ok", "ok"]


def test_what_takes_too_much_memory_or_time_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_rig, "num_copies", lambda *_, **__: 64)
    record = run(tmp_path, "--cases", f"{DECODE},decode:64x32768:16/8x128:p16", "--memory-gib", "1")
    small, large = record["cells"]
    assert small["status"] == "ok"
    assert large["status"] == "skipped"
    assert large["reason"] == "K and V of 64 layers take 1024.0 GiB, --memory-gib allows 1.0"
    clock = iter([0.0, 0.0, 5.0, *[11.0] * 20])
    monkeypatch.setattr(attention_cells.time, "monotonic", lambda: next(clock))
    record = run(tmp_path, "--cases", f"{DECODE},{PREFILL}", "--time-limit", "10")
    assert [one["status"] for one in record["cells"]] == ["ok", "skipped"]
    assert record["cells"][1]["reason"] == "the time that --time-limit gives was over"


def test_the_grid_of_a_cpu_runs_and_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "grid.png"
    record = run(
        tmp_path, "--rows", "2", "--contexts", "16,32", "--prompts", "1x16,1x8+16",
        "--page-sizes", "8", "--backends", "torch", "--picture", str(picture),
    )  # fmt: skip
    assert [one["case"] for one in record["cells"]] == [
        "decode:2x8-24:16/8x128:p8", "decode:2x16-48:16/8x128:p8",
        "prefill:1x16:16/8x128:p8", "prefill:1x8+16:16/8x128:p8",
    ]  # fmt: skip
    assert all(one["status"] == "ok" for one in record["cells"])
    assert (record["benchmark"], record["format"]) == ("attention", 1)
    assert record["models"] == {"Qwen3-0.6B": "16/8x128"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_was_kept_is_shown_and_drawn_again(tmp_path, capsys):
    """Catches: a file that does not hold all that its tables say."""
    pytest.importorskip("matplotlib")
    run(tmp_path, "--cases", f"{DECODE},{PREFILL}", "--backends", "torch")
    tables = capsys.readouterr().out.partition("2 cases on torch")[2].partition("\n\n2 cells")[0]
    line = ["bench", "kernels", "--attention", "--read", str(tmp_path / "out.json")]
    assert main([*line, "--picture", str(tmp_path / "again.png")]) == 0
    shown = capsys.readouterr().out.partition("2 cases on torch")[2]
    assert shown.strip() == tables.strip()
    assert "torch" in shown
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")
    assert main([*line[:-1], str(tmp_path / "none.json")]) == 2
    assert "--read='" in capsys.readouterr().err


def shown(tmp_path, capsys, **changes):
    """Show a file of two backends, changed so; return the exit code and what was printed."""
    cells = [
        cell(text, name, 5.0, rate=1e9, fraction=0.5)
        for text in (DECODE, PREFILL) for name in ("acme:a", "acme:b")
    ]  # fmt: skip
    path = write_measurements(tmp_path / "kept.json", changes.pop("cells", cells), **changes)
    code = main(["bench", "kernels", "--attention", "--read", str(path)])
    return code, capsys.readouterr()


def test_published_cases_alone_are_shown(tmp_path, capsys):
    """A run that was stopped after its first table has no others."""
    cells = [cell(DECODE, "acme:a", 5.0, part="published", rate=1e9, fraction=0.5)]
    code, printed = shown(tmp_path, capsys, cells=cells)
    assert (code, DECODE in printed.out) == (0, True)


def test_a_backend_without_a_cell_leaves_a_hole(tmp_path, capsys):
    cells = [
        cell(DECODE, "acme:a", 5.0, rate=1e9, fraction=0.5),
        cell(PREFILL, "acme:b", 5.0, rate=1e9, fraction=0.5),
    ]
    code, printed = shown(tmp_path, capsys, cells=cells)
    lines = {line.split()[0]: line.split() for line in printed.out.splitlines() if line}
    assert code == 0
    assert lines[DECODE][-1] == "-"
    assert lines[PREFILL][1] == "-"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"refused": []}, "$.refused"),
        ({"command": None}, "$.command"),
        ({"cells": [{**cell(DECODE, "acme:a", 5.0), "case": "decode"}]}, "'decode' is no case"),
        ({"cells": [{**cell(DECODE, "acme:a", 5.0), "times_us": 5}]}, "$.cells[0].times_us"),
        ({"cells": [cell(DECODE, "acme:a", 5.0)]}, "has no us, rate or fraction"),
    ],
)
def test_a_kept_file_that_was_spoilt_is_refused(changes, message, tmp_path, capsys):
    code, printed = shown(tmp_path, capsys, **changes)
    assert code == 2
    assert "error: --read='" in printed.err
    assert message in printed.err


def test_cases_that_take_more_memory_than_is_free_are_skipped(tmp_path, monkeypatch):
    """Catches: a CPU whose memory nobody has asked about, and a process that is killed."""
    free = DeviceMemory(total=2**30, free=1000)
    monkeypatch.setattr(memory_plan, "measure", lambda device: free)
    record = run(tmp_path, "--cases", DECODE)
    assert [one["status"] for one in record["cells"]] == ["skipped"]
    assert "--memory-gib allows 0.0" in record["cells"][0]["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--phases", "decode"], "--phases is about the grid of attention; add --attention"),
        (["--attention", "--only", "ops"], "leave --only out"),
        (["--attention", "--cases", DECODE, "--contexts", "5"], "leave --contexts out"),
        (["--attention", "--cases", DECODE, "--rows", "5"], "leave --rows out"),
        (["--attention", "--read", "x.json", "--rows", "5"], "leave all but --picture out"),
        (["--attention", "--read", "x.json", "--backends", "torch"], "leave all but --picture"),
        (["--attention", "--model", "Qwen3-14B"], "the heads of --models; leave --model out"),
        (["--attention", "--contexts", "5,0"], "--contexts: a number of at least 1 is needed"),
        (["--attention", "--picture", "grid.png.txt"], "a picture ends with .png, .svg"),
        (["--attention", "--phases", "verify"], "unknown name 'verify'"),
        (["--attention", "--models", "Qwen3-14"], "Nearest: 'Qwen3-14B'"),
        (["--attention", "--prompts", "5"], "'5' is no prefill"),
        (["--attention", "--backends", "torhc"], "Nearest: 'torch'"),
        (["--attention", "--picture", "/nowhere/x.png"], "--picture '/nowhere/x.png'"),
    ],
)
def test_flags_that_mean_nothing_are_refused(words, message, capsys):
    assert main(["bench", "kernels", "--quick", *words]) in {2, 3}
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_no_traceback(monkeypatch, capsys):
    """Before the run if that can be known, and a full disk when it is."""
    line = [*COMMAND, "--cases", DECODE, "--json"]
    assert main([*line, "/dev/full"]) == 1
    assert "'/dev/full' cannot be written: No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(output.os, "access", lambda *_: False)
    assert main([*line, "x.json"]) == 2
    assert "--json 'x.json': no file can be made in its folder" in capsys.readouterr().err
    assert main([*line, "/dev/null"]) == 2
    assert "--json '/dev/null' cannot be written to; name another file" in capsys.readouterr().err


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["bench", "kernels", "--attention", "--picture", "x.png"]) == 2
    error = capsys.readouterr().err
    assert "--picture needs matplotlib" in error
    assert "pip install 'minisgl-core[bench]'" in error
