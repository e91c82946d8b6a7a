"""Configurations of published models: what our reader makes of each, and how many parameters."""

import json

import pytest

from minisgl.benchmark.published import CONFIGS, write_config
from minisgl.cli import main
from minisgl.errors import SettingsError
from minisgl.models.opening import open_checkpoint
from minisgl.plugins.host import load_plugins
from minisgl.plugins.lazy import load_object

BILLIONS = {
    "Qwen3-0.6B": 0.596,
    "Qwen3-1.7B": 1.721,
    "Qwen3-4B": 4.022,
    "Qwen3-8B": 8.191,
    "Qwen3-14B": 14.768,
    "Qwen3-32B": 32.762,
    "Qwen3-30B-A3B": 30.532,
    "Qwen1.5-MoE-A2.7B": 14.316,
    "Mixtral-8x7B": 46.703,
    "OLMoE-1B-7B": 6.919,
    "Llama-3.1-8B": 8.030,
    "Llama-3.2-1B": 1.236,
}
"""Parameters, as the publishers state them, a tied head counted once."""


def read(folder):
    checkpoint = open_checkpoint(folder, "dummy")
    record = load_plugins().model_for(checkpoint.architectures)
    return load_object(record.config_reader)(checkpoint.hf_config), checkpoint


def num_parameters(config):
    """Count the weights of a decoder from its configuration alone."""
    hidden, head_dim = config.hidden_size, config.head_dim
    attention = 2 * hidden * head_dim * (config.num_q_heads + config.num_kv_heads)
    if config.attention_bias:
        attention += head_dim * (config.num_q_heads + 2 * config.num_kv_heads)
    heads = {None: 0, "heads": 2, "whole": config.num_q_heads + config.num_kv_heads}
    norms = 2 * hidden + heads[config.qk_norm] * head_dim
    mlp = 3 * hidden * config.intermediate_size
    if config.moe is not None:
        experts = config.moe.num_experts
        mlp = experts * (3 * hidden * config.moe.intermediate_size + hidden)
        if config.moe.shared_intermediate_size is not None:
            mlp += 3 * hidden * config.moe.shared_intermediate_size + hidden
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * (attention + norms + mlp) + embeddings + hidden


@pytest.mark.parametrize("name", CONFIGS)
def test_our_reader_understands_it_and_the_parameters_are_as_many_as_published(name, tmp_path):
    """Catches: a wrong width, depth, number of heads or of experts, or a wrongly tied head."""
    write_config(name, tmp_path / name)
    config, checkpoint = read(tmp_path / name)
    assert round(num_parameters(config) / 1e9, 3) == BILLIONS[name]
    assert config.dtype == "bfloat16"
    assert set(config.sliding_windows) == {None}
    assert len(checkpoint.eos_token_ids) == 1
    family = name.split("-")[0]
    assert (config.qk_norm, config.max_position) == {
        "Qwen3": ("heads", 40960),
        "Qwen1.5": (None, 8192),
        "Mixtral": (None, 32768),
        "OLMoE": ("whole", 4096),
        "Llama": (None, 131072),
    }[family]
    assert (config.head_dim, config.rope.rope_type, config.rope.theta) == {
        "Qwen3": (128, "default", 1e6),
        "Qwen1.5": (128, "default", 1e6),
        "Mixtral": (128, "default", 1e6),
        "OLMoE": (128, "default", 1e4),
        "Llama": (64 if name == "Llama-3.2-1B" else 128, "llama3", 5e5),
    }[family]


def test_shapes_that_the_number_of_parameters_does_not_show(tmp_path):
    heads = {}
    for name in CONFIGS:
        config, _ = read(write_config(name, tmp_path / name).parent)
        heads[name] = (config.num_q_heads, config.num_kv_heads)
    assert heads == {
        "Qwen3-0.6B": (16, 8),
        "Qwen3-1.7B": (16, 8),
        "Qwen3-4B": (32, 8),
        "Qwen3-8B": (32, 8),
        "Qwen3-14B": (40, 8),
        "Qwen3-32B": (64, 8),
        "Qwen3-30B-A3B": (32, 4),
        "Qwen1.5-MoE-A2.7B": (16, 16),
        "Mixtral-8x7B": (32, 8),
        "OLMoE-1B-7B": (16, 16),
        "Llama-3.1-8B": (32, 8),
        "Llama-3.2-1B": (32, 8),
    }
    assert config.rope.parameters["factor"] == 32.0
    for name, expected in {
        "Qwen3-30B-A3B": (128, 8, True, 48),
        "Qwen1.5-MoE-A2.7B": (60, 4, False, 24),
        "Mixtral-8x7B": (8, 2, True, 32),
        "OLMoE-1B-7B": (64, 8, False, 16),
    }.items():
        moe = read(tmp_path / name)[0].moe
        assert (moe.num_experts, moe.top_k, moe.renormalize, len(moe.layers)) == expected


def test_the_command_writes_and_never_replaces_another_one(tmp_path, capsys):
    folder = tmp_path / "new" / "Qwen3-0.6B"
    for _ in range(2):
        assert main(["bench", "write-config", "Qwen3-0.6B", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(folder / "config.json")
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 1024
    with pytest.raises(SettingsError, match="name a new folder"):
        write_config("Qwen3-4B", folder)
    file = folder / "config.json"
    assert main(["bench", "write-config", "Qwen3-0.6B", str(file)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    file.write_bytes(b"\xff")
    assert main(["bench", "write-config", "Qwen3-0.6B", str(folder)]) == 2
    assert "exists and is another one" in capsys.readouterr().err
    assert main(["bench", "write-config", "qwen3-0.6b", str(folder)]) == 2
    assert "Nearest: 'Qwen3-0.6B'" in capsys.readouterr().err
