"""The search of ``minisgl tune moe``, with times that a test makes up."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from minisgl.errors import SettingsError, UnsupportedBackendError
from minisgl.moe import MoeContext, TuneRequest
from minisgl_moe_triton import candidates, tune
from minisgl_moe_triton.configs import Columns, Few, Grouped, Tile, find_tuned, user_folder
from minisgl_moe_triton.create import key_of
from minisgl_moe_triton.settings import TritonMoeSettings

SHARED = 227 * 1024
DEFAULTS = TritonMoeSettings()

CONTEXT = MoeContext(
    device=torch.device("cpu"), dtype=torch.bfloat16, num_experts=4, top_k=2, hidden_size=64,
    intermediate_size=64, activation="silu", max_num_tokens=200,
)  # fmt: skip


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let a launch take as long as it has outputs, 8 warps never fit; returns what was timed."""
    options: list[object] = []

    def seconds(calls: Sequence[partial[object]], least: float = 0.0) -> float:
        del least
        what = next(one for one in calls[0].args if isinstance(one, Tile | Columns | Few | Grouped))
        options.append(what)
        if isinstance(what, Few | Grouped):
            return 1.0 if isinstance(what, Few) else 2.0
        return what.outputs + what.warps / 100

    def usable(calls: Sequence[Callable[[], object]]) -> list[bool]:
        return [call.args[0].warps != 8 for call in calls]  # type: ignore[attr-defined]

    monkeypatch.setattr(tune, "time_on_gpu", seconds)
    monkeypatch.setattr(tune, "compile_in_parallel", usable)
    monkeypatch.setattr(tune.Search, "run", lambda *_: None)
    monkeypatch.setattr(tune, "require_gpu", lambda _: None)
    monkeypatch.setattr(tune, "shared_memory", lambda _: SHARED)
    return options


def quickest(options: Iterable[Any]) -> list[Any]:
    fitting = [one for one in options if one.warps != 8]
    least = min(one.outputs for one in fitting)
    return [one for one in fitting if one.outputs == least]


def test_the_fastest_launch_that_fits_is_kept(timed: list[object], tmp_path: Path) -> None:
    request = TuneRequest(tokens=(1, 200), folder=tmp_path, progress=False)
    text = tune.tune(CONTEXT, DEFAULTS, request)
    found = find_tuned(key_of(CONTEXT), tmp_path)
    assert found is not None
    few, grouped = found.launches
    assert isinstance(few, Few), "it was faster as a whole"
    assert isinstance(grouped, Grouped)
    for product, places in ((few.gate_up, 2), (few.down, 2)):
        assert product in quickest(candidates.columns(64, places))
    for tile, gated in ((grouped.gate_up, True), (grouped.down, False)):
        tried = quickest(candidates.tiles(grouped.rows, tile.group, SHARED, gated=gated, tma=True))
        assert tile in tried
    assert f"to use it, type: --set backend_options.triton.tuned_folder={tmp_path}" in text
    assert "not sorted" in text
    assert "tiles of" in text


def test_a_time_limit_ends_it_with_what_was_found(
    timed: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 100_000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    tune.tune(CONTEXT, DEFAULTS, TuneRequest(tokens=(1, 9, 40), folder=tmp_path, time_limit_s=15))
    found = find_tuned(key_of(CONTEXT), tmp_path)
    assert found is not None
    assert [launch.tokens for launch in found.launches] == [1]


def test_the_fastest_tiles_that_copy_weights_are_tried_without(
    timed: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = tune.time_on_gpu

    def quicker_without(calls: Sequence[partial[object]], least: float = 0.0) -> float:
        took = seconds(calls, least)
        what = timed[-1]
        return took - 0.5 if isinstance(what, Tile) and not what.tma else took

    monkeypatch.setattr(tune, "time_on_gpu", quicker_without)
    tune.tune(CONTEXT, DEFAULTS, TuneRequest(tokens=(16,), folder=tmp_path, progress=False))
    found = find_tuned(key_of(CONTEXT), tmp_path)
    assert found is not None
    (launch,) = found.launches
    assert isinstance(launch, Grouped)
    assert not launch.gate_up.tma
    assert not launch.down.tma
    tiles = [one for one in timed if isinstance(one, Tile)]
    assert sum(not one.tma for one in tiles) <= len(tiles) / 2


@pytest.mark.usefixtures("timed")
def test_where_nothing_copies_weights_all_tiles_are_tried_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def usable(calls: Sequence[Callable[[], object]]) -> list[bool]:
        options = [call.args[0] for call in calls]  # type: ignore[attr-defined]
        tried.extend(options)
        return [not getattr(option, "tma", False) for option in options]

    monkeypatch.setattr(tune, "compile_in_parallel", usable)
    tune.tune(CONTEXT, DEFAULTS, TuneRequest(tokens=(16,), folder=tmp_path, progress=False))
    without = {
        one.model_copy(update={"tma": True})
        for one in tried
        if isinstance(one, Tile) and not one.tma
    }
    assert without >= {one for one in tried if isinstance(one, Tile) and one.tma}


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(("fits", "kind"), [(Tile, Grouped), (Columns, Few)])
def test_one_way_of_which_nothing_fits_leaves_the_others(
    fits: type, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tune,
        "compile_in_parallel",
        lambda calls: [isinstance(call.args[0], fits) for call in calls],
    )
    tune.tune(CONTEXT, DEFAULTS, TuneRequest(tokens=(1,), folder=tmp_path, progress=False))
    found = find_tuned(key_of(CONTEXT), tmp_path)
    assert found is not None
    assert [type(launch) for launch in found.launches] == [kind]


def test_experts_in_fp8_are_tuned_in_tiles_of_theirs(timed: list[object], tmp_path: Path) -> None:
    context = replace(CONTEXT, weights_dtype=torch.float8_e4m3fn)
    request = TuneRequest(tokens=(1, 200), folder=tmp_path, progress=False)
    tune.tune(context, DEFAULTS, request)
    found = find_tuned(key_of(context), tmp_path)
    assert found is not None
    assert find_tuned(key_of(CONTEXT), tmp_path) is None
    grouped = found.launches[1]
    assert isinstance(grouped, Grouped)
    tried = quickest(candidates.tiles(grouped.rows, 8, SHARED, gated=False, tma=True, item=1))
    assert grouped.down.model_copy(update={"group": 8}) in tried
    tiles = [one for one in timed if isinstance(one, Tile)]
    assert min(one.inputs for one in tiles) >= 64, "128 bytes of a row, seldom fewer"


@pytest.mark.usefixtures("timed")
def test_nothing_that_fits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "compile_in_parallel", lambda calls: [False] * len(calls))
    with pytest.raises(UnsupportedBackendError, match="no launch of these sizes fits"):
        tune.tune(CONTEXT, DEFAULTS, TuneRequest(tokens=(1,), folder=tmp_path, progress=False))


@pytest.mark.usefixtures("timed")
def test_other_numbers_of_tokens_stay_and_a_broken_file_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / key_of(CONTEXT).file_name
    file.write_bytes(b"no JSON\xff")
    for tokens in ((16, 1), (4,), (16,)):
        tune.tune(CONTEXT, DEFAULTS, TuneRequest(tokens=tokens, folder=tmp_path, progress=False))
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warning.startswith(f"What is there is replaced: '{file}' is no file of tuned")
    found = find_tuned(key_of(CONTEXT), tmp_path)
    assert found is not None
    assert [launch.tokens for launch in found.launches] == [1, 4, 16]


@pytest.mark.usefixtures("timed")
def test_what_lies_where_the_backend_looks_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    text = tune.tune(CONTEXT, DEFAULTS, TuneRequest(tokens=(1,), progress=False))
    assert "it is used from now on" in text
    assert find_tuned(key_of(CONTEXT)) is not None


@pytest.mark.usefixtures("timed")
def test_the_folder_of_the_settings_is_where_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    settings = TritonMoeSettings(tuned_folder=Path("tuned"))
    for tokens in ((4,), (1,)):
        text = tune.tune(CONTEXT, settings, TuneRequest(tokens=tokens, progress=False))
    assert "tuned_folder names that folder, as it does here" in text
    found = find_tuned(key_of(CONTEXT), tmp_path / "tuned")
    assert found is not None
    assert [launch.tokens for launch in found.launches] == [1, 4], "what was there is kept"
    assert not (tmp_path / "config").exists()


@pytest.mark.usefixtures("timed")
def test_a_folder_that_is_asked_for_comes_before_that_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own folder is not looked into either, while the settings name another."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings = TritonMoeSettings(tuned_folder=tmp_path / "other")
    request = TuneRequest(tokens=(1,), folder=user_folder(), progress=False)
    text = tune.tune(CONTEXT, settings, request)
    assert f"type: --set backend_options.triton.tuned_folder={user_folder()}" in text
    assert find_tuned(key_of(CONTEXT), user_folder()) is not None
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("named", ["--folder", "backend_options.triton.tuned_folder", "default"])
def test_a_folder_that_cannot_be_written_to_is_said_before_the_search(
    timed: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(taken))
    settings = TritonMoeSettings(tuned_folder=taken if named.endswith("tuned_folder") else None)
    request = TuneRequest(tokens=(1,), folder=taken if named == "--folder" else None)
    with pytest.raises(SettingsError, match=rf"{named}.*taken.*cannot be written to: .*--folder"):
        tune.tune(CONTEXT, settings, request)
    assert not timed


def test_it_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedBackendError, match=r"engine\.device is cpu"):
        tune.tune(CONTEXT, DEFAULTS, TuneRequest(folder=tmp_path))


@pytest.mark.parametrize("item", [2, 1])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_candidates_fit_and_differ(rows: int, gated: bool, item: int) -> None:
    tiles = list(candidates.tiles(rows, 1, SHARED, gated=gated, tma=True, item=item))
    assert len(set(tiles)) == len(tiles) >= 10
    for tile in tiles:
        used = tile.stages * tile.inputs * (tile.outputs * (1 + gated) + rows) * item
        assert used <= SHARED
        assert not tile.swapped or tile.outputs >= 64
    assert {tile.swapped for tile in tiles} == {True, False}


@pytest.mark.parametrize(("mean", "first"), [(0.1, 16), (10, 16), (16, 32), (60, 128), (999, 128)])
def test_tiles_hold_about_what_an_expert_has(mean: float, first: int) -> None:
    found = candidates.tile_rows(mean)
    assert found[0] == first
    assert len(set(found)) == len(found) >= 2
