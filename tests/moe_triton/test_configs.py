"""Which launch belongs to a number of tokens: tuned files, and the rule of thumb."""

import errno
import json
import logging
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from minisgl.errors import SettingsError
from minisgl.moe import MoeContext
from minisgl_moe_triton.configs import (
    TOKENS,
    Columns,
    Few,
    Grouped,
    Key,
    Tile,
    TunedFile,
    choose,
    find_tuned,
    rule_of_thumb,
    shared_bytes,
    user_folder,
    write_tuned,
)

KEY = Key(experts=8, inner=64, hidden=32, dtype="bfloat16", device="NVIDIA H200 (x)", triton="3.6")
TILE = Tile(outputs=64, inputs=64, group=1, stages=3, warps=4, swapped=True)
COLUMNS = Columns(outputs=4, inputs=64, warps=4)
FILE = TunedFile(
    source="here",
    launches=(
        Few(tokens=4, gate_up=COLUMNS, down=COLUMNS),
        Grouped(tokens=64, rows=16, gate_up=TILE, down=TILE),
        Grouped(tokens=512, rows=64, gate_up=TILE, down=TILE),
    ),
)

CONTEXT = MoeContext(
    device=torch.device("cpu"), dtype=torch.float16, num_experts=4, top_k=2, hidden_size=64,
    intermediate_size=64, activation="silu", max_num_tokens=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "tuned"), [(1, 4), (4, 4), (5, 64), (64, 64), (65, 512), (512, 512), (9000, 512)]
)
def test_a_launch_is_that_of_the_next_larger_number(tokens, tuned):
    assert choose(FILE.launches, tokens).tokens == tuned


def test_a_file_is_read_as_it_was_written_in_any_order(tmp_path):
    shuffled = FILE.model_copy(update={"launches": FILE.launches[::-1]})
    written = write_tuned(KEY, shuffled, tmp_path / "new" / "folder")
    assert written.name == KEY.file_name
    assert find_tuned(KEY, tmp_path / "new" / "folder") == FILE


@pytest.mark.parametrize(
    "change",
    [
        {"experts": 9}, {"inner": 65}, {"hidden": 33}, {"dtype": "float16"}, {"device": "other"},
        {"triton": "3.7"},
    ],
)  # fmt: skip
def test_a_file_belongs_to_one_key(tmp_path, change):
    write_tuned(KEY, FILE, tmp_path)
    facts = {name: getattr(KEY, name) for name in Key.__dataclass_fields__}
    assert find_tuned(Key(**{**facts, **change}), tmp_path) is None


def test_the_users_folder_is_below_the_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_tuned(KEY, FILE, user_folder())
    assert find_tuned(KEY) == FILE
    assert tmp_path in user_folder().parents


@pytest.mark.parametrize(
    ("contents", "fault"),
    [
        (b"", "Invalid JSON"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (b"{}", "launches="),
        (b'{"launches": []}', r"launches=\[\]"),
        (b'{"launches": [{"kind": "new"}]}', "launches.0={'kind': 'new'}"),
    ],
)
def test_a_file_that_is_none_is_named_with_the_way_out(tmp_path, contents, fault):
    (tmp_path / KEY.file_name).write_bytes(contents)
    with pytest.raises(SettingsError, match=rf"experts-8.*{fault}.*minisgl tune moe"):
        find_tuned(KEY, tmp_path)


@pytest.mark.parametrize("place", ["rows", "gate_up.outputs", "down.inputs"])
def test_sides_that_triton_does_not_know_are_named_with_their_value(tmp_path, place):
    values = json.loads(FILE.model_dump_json())
    part, launch = values["launches"][1], "launches.1.grouped"
    *way, last = place.split(".")
    for name in way:
        part = part[name]
    part[last] = 48
    (tmp_path / KEY.file_name).write_text(json.dumps(values))
    with pytest.raises(SettingsError, match=rf"{launch}.{place}=48: .*must be a power of 2"):
        find_tuned(KEY, tmp_path)


def test_what_cannot_be_read_is_no_missing_file(tmp_path):
    (tmp_path / KEY.file_name).mkdir()
    with pytest.raises(
        SettingsError, match=r"experts-8.* cannot be read: Is a directory. Mend that"
    ):
        find_tuned(KEY, tmp_path)


def test_a_file_behind_a_link_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "far").mkdir()
    link = tmp_path / KEY.file_name
    link.symlink_to("far/real.json")
    write_tuned(KEY, FILE, tmp_path)
    assert link.is_symlink()
    assert find_tuned(KEY, tmp_path) == FILE
    assert [one.name for one in (tmp_path / "far").iterdir()] == ["real.json"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    write_tuned(KEY, FILE, tmp_path)

    def full(path, text, **how):
        with path.open("w") as out:
            out.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_tuned(KEY, FILE, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [KEY.file_name]
    assert find_tuned(KEY, tmp_path) == FILE


@pytest.mark.parametrize("shared", [48 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (8, 2), (1, 1), (512, 10)])
@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_the_rule_of_thumb_has_a_launch_for_every_number_that_fits(
    experts, top_k, shared, dtype, item
):
    key = Key(experts=experts, inner=768, hidden=2048, dtype=dtype, device="any", triton="3.6")
    launches = rule_of_thumb(key, top_k, shared)
    assert [launch.tokens for launch in launches] == list(TOKENS)
    assert isinstance(launches[0], Few)
    assert not any(isinstance(one, Few) and one.tokens * top_k > experts for one in launches[1:])
    rows = [launch.rows for launch in launches if isinstance(launch, Grouped)]
    assert rows == sorted(rows)
    assert set(rows) <= {16, 32, 64, 128}
    for launch in launches:
        if isinstance(launch, Grouped):
            assert shared_bytes(launch.gate_up, launch.rows, gated=True, item=item) <= shared
            assert shared_bytes(launch.down, launch.rows, gated=False, item=item) <= shared
            # The least that a tensor core multiplies: 32 bytes of a row.
            assert min(launch.gate_up.inputs, launch.down.inputs) * item >= 32


def test_experts_in_fp8_have_a_key_of_their_own():
    pytest.importorskip("triton")
    from minisgl_moe_triton.create import key_of

    context = MoeContext(
        device=torch.device("cpu"), dtype=torch.float16, num_experts=4, top_k=2, hidden_size=64,
        intermediate_size=64, activation="silu", max_num_tokens=4,
    )  # fmt: skip
    keys = [key_of(context), key_of(replace(context, weights_dtype=torch.float8_e4m3fn))]
    assert [key.dtype for key in keys] == ["float16", "float8_e4m3fn"]
    assert [key.item for key in keys] == [2, 1]


def test_shipped_files_belong_to_the_key_that_they_are_named_by():
    folder = resources.files("minisgl_moe_triton").joinpath("tuned")
    for file in folder.iterdir() if folder.is_dir() else ():
        found = re.fullmatch(
            r"experts-(\d+)_inner-(\d+)_hidden-(\d+)_(\w+)_([\w-]+)_triton-([\d.]+)\.json",
            file.name,
        )
        assert found, file.name
        experts, inner, hidden, dtype, device, version = found.groups()
        key = Key(
            experts=int(experts), inner=int(inner), hidden=int(hidden), dtype=dtype, device=device,
            triton=version,
        )  # fmt: skip
        assert key.file_name == file.name
        assert find_tuned(key) is not None


def test_without_a_file_a_warning_names_the_command(tmp_path, caplog):
    pytest.importorskip("triton")
    from minisgl_moe_triton import create
    from minisgl_moe_triton.settings import TritonMoeSettings

    settings = TritonMoeSettings(tuned_folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        create.create_backend(CONTEXT, settings)
    (record,) = caplog.records
    assert "minisgl tune moe --model" in record.getMessage()
    caplog.clear()
    write_tuned(create.key_of(CONTEXT), FILE, tmp_path)
    create.create_backend(CONTEXT, settings)
    assert not caplog.records


def test_a_folder_that_is_not_there_is_named_by_a_warning(tmp_path, caplog):
    pytest.importorskip("triton")
    from minisgl_moe_triton import create
    from minisgl_moe_triton.settings import TritonMoeSettings

    with caplog.at_level(logging.WARNING):
        create.create_backend(CONTEXT, TritonMoeSettings(tuned_folder=tmp_path / "tunde"))
    first, second = caplog.records
    assert "tuned_folder=" in first.getMessage()
    assert "tunde' is no folder that is there" in first.getMessage()
    assert "minisgl tune moe --model" in second.getMessage()


def test_tuned_launches_that_cannot_run_name_their_file(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources

    from minisgl_moe_triton import create
    from minisgl_moe_triton.settings import TritonMoeSettings

    def too_large(*_):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(create, "compile_launches", too_large)
    key = create.key_of(CONTEXT)
    write_tuned(key, FILE, tmp_path)
    settings = TritonMoeSettings(tuned_folder=tmp_path)
    with pytest.raises(SettingsError, match=r"experts-4.*shared memory.*Delete it, if") as info:
        create.create_backend(CONTEXT, settings)
    assert str(tmp_path) in str(info.value)
    (tmp_path / key.file_name).unlink()
    with pytest.raises(OutOfResources):  # the rule of thumb's: no file is at fault
        create.create_backend(CONTEXT, settings)


def test_the_home_folder_may_be_written_as_in_a_shell(monkeypatch):
    from minisgl_moe_triton.settings import TritonMoeSettings

    monkeypatch.setenv("HOME", "/home/someone")
    assert TritonMoeSettings(tuned_folder="~/tuned").tuned_folder == Path("/home/someone/tuned")
    with pytest.raises(ValidationError, match="names a home folder that is not known"):
        TritonMoeSettings(tuned_folder="~nobody-of-that-name/tuned")
