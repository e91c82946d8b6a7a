"""Rotary tables equal those of transformers' initialisers, and lengths are what they promise."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl.errors import ModelLoadError
from minisgl.layers.rotary import ROPE_KINDS, RotaryEmbedding, inverse_frequencies
from minisgl_models.hf_config import read_rope
from minisgl_models.llama import read_config as read_llama_config
from support.forward import build_context, read_config
from support.tiny_models import build_tiny_model, write_tiny_model

HEAD_DIM = 16
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "yarn with attention factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 0.7,
    },
    "yarn with mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn not truncated": {
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
    },
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 256,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def llama_config(rope_type, **parameters):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": rope_type, "rope_theta": 5000.0, **parameters},
        architectures=["LlamaForCausalLM"],
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_equal_the_initialiser(name):
    kind = name.split()[0]
    if kind not in ROPE_INIT_FUNCTIONS and kind != "default":
        pytest.skip(f"this transformers has no {kind!r}")
    config = llama_config(kind, **KINDS[name])
    rope = read_rope(config, HEAD_DIM)
    inverse, factor = inverse_frequencies(rope, max_seq_len=32)
    if kind == "default":
        expected, expected_factor = 1.0 / 5000.0 ** (torch.arange(0, 16, 2) / 16), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(inverse, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-9)


def test_every_initialiser_is_supported():
    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPE_KINDS)


def test_longrope_beyond_the_original_context_takes_the_long_factors():
    config = llama_config("longrope", **KINDS["longrope"])
    inverse, _ = inverse_frequencies(read_rope(config, HEAD_DIM), max_seq_len=1024)
    expected, _ = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=1024)
    torch.testing.assert_close(inverse, expected, rtol=1e-6, atol=0)


def test_table_holds_scaled_cosines_and_sines(tmp_path):
    parameters = {"rope_theta": 100.0, "rope_type": "yarn", **KINDS["yarn"]}
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM", rope_parameters=parameters)
    config = read_config(folder)
    table = RotaryEmbedding(config.rope, build_context(config, max_seq_len=200)).cos_sin
    model = build_tiny_model("LlamaForCausalLM", rope_parameters=parameters)
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.arange(200)[None])
    half = cos.shape[-1] // 2
    assert cos.max() > 1.1  # the attention factor of YaRN
    torch.testing.assert_close(
        table, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1), rtol=1e-6, atol=1e-6
    )


def test_legacy_names_are_understood():
    config = SimpleNamespace(
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        rope_theta=77.0,
        max_position_embeddings=1024,
    )
    rope = read_rope(config, HEAD_DIM)
    assert (rope.rope_type, rope.theta, rope.original_max_position) == ("yarn", 77.0, 256)


@pytest.mark.parametrize(
    ("rope_type", "parameters", "expected"),
    [
        ("default", {}, 1024),
        ("linear", {"factor": 4.0}, 4096),
        ("dynamic", {"factor": 4.0}, 1024),
        ("llama3", KINDS["llama3"], 1024),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ("longrope", KINDS["longrope"], 1024),
    ],
)
def test_longest_sequence_counts_scaling(rope_type, parameters, expected):
    assert read_llama_config(llama_config(rope_type, **parameters)).max_position == expected


def test_unknown_kind_is_refused_with_the_nearest_name():
    config = SimpleNamespace(
        rope_parameters={"rope_type": "yarnn", "factor": 2.0}, max_position_embeddings=64
    )
    with pytest.raises(ModelLoadError, match=r"'yarnn'.*supported: default.*Nearest: 'yarn'"):
        read_rope(config, HEAD_DIM)


def test_missing_parameter_is_named():
    config = SimpleNamespace(
        rope_parameters={"rope_type": "llama3", "factor": 8.0}, max_position_embeddings=64
    )
    with pytest.raises(ModelLoadError, match=r"lack 'low_freq_factor'.*'llama3'"):
        inverse_frequencies(read_rope(config, HEAD_DIM), 64)


def test_activation_that_is_not_offered_is_refused():
    config = llama_config("default")
    config.hidden_act = "relu"
    with pytest.raises(ModelLoadError, match=r"hidden_act='relu'.*supported: silu"):
        read_llama_config(config)
