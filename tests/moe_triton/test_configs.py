"""Which launch belongs to a number of tokens: tuned files, and the rule of thumb."""

import logging
import re
from dataclasses import replace
from importlib import resources

import pytest
import torch

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


@pytest.mark.parametrize("text", ["", "{}", '{"launches": []}', '{"launches": [{"kind": "new"}]}'])
def test_a_file_that_is_none_is_named_with_the_way_out(tmp_path, text):
    (tmp_path / KEY.file_name).write_text(text)
    with pytest.raises(SettingsError, match=r"experts-8.*minisgl tune moe"):
        find_tuned(KEY, tmp_path)


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

    context = MoeContext(
        device=torch.device("cpu"), dtype=torch.float16, num_experts=4, top_k=2, hidden_size=64,
        intermediate_size=64, activation="silu", max_num_tokens=4,
    )  # fmt: skip
    settings = TritonMoeSettings(tuned_folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        create.create_backend(context, settings)
    (record,) = caplog.records
    assert "minisgl tune moe --model" in record.getMessage()
    caplog.clear()
    write_tuned(create.key_of(context), FILE, tmp_path)
    create.create_backend(context, settings)
    assert not caplog.records
