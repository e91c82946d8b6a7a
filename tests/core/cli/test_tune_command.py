"""``minisgl tune moe``: what it asks of which backend, and what it refuses."""

import shutil

import pytest

from minisgl.cli import main
from support import plugin_code
from support.tiny_models import write_tiny_model

TUNE = """
def tune(context, settings, request):
    return f"{context.num_experts} experts of {context.intermediate_size}, {settings}, {request}"
"""


@pytest.fixture
def experts(tmp_path):
    return write_tiny_model(tmp_path / "experts", "Qwen3MoeForCausalLM")


def test_it_asks_the_chosen_backend(plugin_site, experts, tmp_path, capsys):
    code = plugin_code.moe().replace("create=", "tune=tune, create=")
    plugin_site.add("acme", TUNE + code)
    line = ["tune", "moe", "--model", str(experts), "--tokens", "1,16", "--time-limit", "9"]
    assert main([*line, "--folder", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "6 experts of 32" in out
    assert "tokens=(1, 16)" in out
    assert str(tmp_path) in out
    assert "time_limit_s=9" in out


@pytest.mark.parametrize("by_file", [True, False])
def test_it_hands_the_backend_its_settings(plugin_site, experts, tmp_path, capsys, by_file):
    code = plugin_code.moe().replace("create=", "tune=tune, create=")
    plugin_site.add("acme", TUNE + code)
    config = tmp_path / "minisgl.toml"
    config.write_text("[backend_options.acme]\nwidth = 7\n")
    given = ["--config", str(config)] if by_file else ["--set", "backend_options.acme.width=7"]
    assert main(["tune", "moe", "--model", str(experts), "--device", "cpu", *given]) == 0
    out = capsys.readouterr().out
    assert "width=7" in out
    assert "folder=None" in out


def test_a_backend_without_anything_to_tune_is_refused(plugin_site, experts, capsys):
    code = plugin_code.moe().replace("create=", "tune=tune, create=")
    plugin_site.add("acme", TUNE + code)
    line = ["tune", "moe", "--model", str(experts), "--moe-backend", "torch", "--device", "cpu"]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert "'minisgl-core:torch' has nothing to tune" in error
    assert "backends that have: acme. Name one with --moe-backend" in error
    assert "minisgl plugins explain moe --model MODEL" in error


def test_the_reason_against_what_could_be_tuned_is_given(plugin_site, experts, capsys):
    """What somebody without a GPU reads who types what the backend's README says."""
    code = plugin_code.moe(devices=("cuda",)).replace("create=", "tune=tune, create=")
    plugin_site.add("acme", TUNE + code)
    assert main(["tune", "moe", "--model", str(experts), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "cannot run here: acme (needs device cuda, found cpu); tune where one can" in error
    assert "Name one" not in error


def test_a_configuration_is_enough(plugin_site, experts, tmp_path, capsys):
    code = plugin_code.moe().replace("create=", "tune=tune, create=")
    plugin_site.add("acme", TUNE + code)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(experts / "config.json", alone)
    line = ["tune", "moe", "--model", str(alone), "--device", "cpu"]
    assert main(line) == 0
    assert "6 experts of 32" in capsys.readouterr().out
    assert main([*line, "--load-format", "auto"]) == 4
    assert "holds no weights" in capsys.readouterr().err


def test_a_dense_model_is_refused(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "dense", "Qwen3ForCausalLM")
    assert main(["tune", "moe", "--model", str(model), "--device", "cpu"]) == 2
    assert "Qwen3ForCausalLM has none; name a model with experts" in capsys.readouterr().err


def test_it_names_the_model_that_is_missing(capsys):
    assert main(["tune", "moe"]) == 2
    assert "--model" in capsys.readouterr().err
