"""Checkpoints of models with experts: both forms of names, and configurations that are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minisgl.errors import ModelLoadError
from support.forward import load_model, logits_of, read_config
from support.tiny_models import write_tiny_model

PROMPT = torch.randint(3, 263, (30,), generator=torch.Generator().manual_seed(5)).tolist()
EXPERT = {
    "MixtralForCausalLM": "model.layers.2.block_sparse_moe.experts.3.w3.weight",
    "OlmoeForCausalLM": "model.layers.2.mlp.experts.3.up_proj.weight",
    "Qwen2MoeForCausalLM": "model.layers.2.mlp.experts.3.up_proj.weight",
    "Qwen3MoeForCausalLM": "model.layers.2.mlp.experts.3.up_proj.weight",
}


def weights(folder):
    return load_file(folder / "model.safetensors")


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("architecture", EXPERT)
def test_stacked_experts_load_like_one_tensor_an_expert(architecture, tmp_path):
    """Both forms are there: transformers writes the published one unless it is told not to."""
    published = write_tiny_model(tmp_path / "published", architecture)
    assert EXPERT[architecture] in weights(published)
    expected = logits_of(*load_model(published), PROMPT)
    stacked = tmp_path / "stacked"
    model = AutoModelForCausalLM.from_pretrained(published)
    model.save_pretrained(stacked, save_original_format=False)
    assert "model.layers.2.mlp.experts.gate_up_proj" in weights(stacked)
    assert torch.equal(logits_of(*load_model(stacked), PROMPT), expected)


@pytest.mark.parametrize("architecture", EXPERT)
def test_a_missing_expert_and_one_too_many_are_listed(architecture, tmp_path):
    folder = write_tiny_model(tmp_path, architecture)
    tensors = weights(folder)
    extra = EXPERT[architecture].replace(".3.", ".9.")
    tensors[extra] = tensors.pop(EXPERT[architecture])
    rewrite(folder, tensors)
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    assert f"missing: 1 tensors ({EXPERT[architecture]})" in str(caught.value)
    assert f"unexpected: 1 tensors ({extra})" in str(caught.value)


def test_stacks_of_another_number_of_experts_are_refused(tmp_path):
    folder = tmp_path / "stacked"
    model = AutoModelForCausalLM.from_pretrained(
        write_tiny_model(tmp_path / "published", "OlmoeForCausalLM")
    )
    model.save_pretrained(folder, save_original_format=False)
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(folder, {key: t[:5] if key == name else t for key, t in weights(folder).items()})
    with pytest.raises(ModelLoadError, match=rf"{name} .* has shape \[5, 64, 48\].*\[6, 64, 48\]"):
        load_model(folder)


@pytest.mark.parametrize("name", ["shared_expert_gate", "shared_expert.down_proj"])
def test_a_missing_part_of_the_shared_expert_is_listed(name, tmp_path):
    folder = write_tiny_model(tmp_path, "Qwen2MoeForCausalLM")
    tensors = weights(folder)
    del tensors[f"model.layers.0.mlp.{name}.weight"]
    rewrite(folder, tensors)
    with pytest.raises(ModelLoadError, match=rf"missing: 1 tensors .*\.0\.mlp\.{name}\.weight"):
        load_model(folder)


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, r"=5 .* num_local_experts=4$"),
        ("MixtralForCausalLM", {"num_local_experts": 0}, r"num_local_experts=0 .* MistralForC"),
        ("OlmoeForCausalLM", {"num_experts_per_tok": 0}, r"=0 .* between 1 and num_experts=6"),
        ("OlmoeForCausalLM", {"num_experts": 0}, r"num_experts=0 .* all layers"),
        ("OlmoeForCausalLM", {"intermediate_size": 0}, r"^intermediate_size=0 .*1 or more"),
        (
            "Qwen2MoeForCausalLM",
            {"shared_expert_intermediate_size": 0},
            r"shared_expert_intermediate_size=0 .*1 or more",
        ),
        ("OlmoeForCausalLM", {"sliding_window": 8}, r"sliding_window=8 .*remove it"),
        ("OlmoeForCausalLM", {"head_dim": 16}, r"head_dim=16 .*must be 8"),
        ("OlmoeForCausalLM", {"clip_qkv": -1.0}, r"clip_qkv=-1\.0 .*null for no limit"),
        ("OlmoeForCausalLM", {"hidden_act": "gelu"}, r"hidden_act='gelu'.*supported: silu"),
        ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 0}, r"decoder_sparse_step=0 .*1 or more"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, r"decoder_sparse_step=0 .*1 or more"),
        (
            "Qwen2MoeForCausalLM",
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            r"has 'chunked_attention', .*supported: full_attention, sliding_attention",
        ),
        (
            "Qwen2MoeForCausalLM",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            r"no window is in use \(use_sliding_window=False",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_field_and_value(
    architecture, values, message, tmp_path
):
    folder = write_tiny_model(tmp_path, architecture)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ModelLoadError, match=message):
        read_config(folder)


def test_shared_expert_and_kind_of_norm_are_read(tmp_path):
    qwen = read_config(write_tiny_model(tmp_path / "qwen", "Qwen2MoeForCausalLM"))
    olmoe = read_config(write_tiny_model(tmp_path / "olmoe", "OlmoeForCausalLM"))
    assert qwen.moe is not None
    assert (qwen.moe.layers, qwen.moe.shared_intermediate_size) == (frozenset({0, 2}), 64)
    assert (olmoe.qk_norm, olmoe.clip_qkv) == ("whole", 2.0)
