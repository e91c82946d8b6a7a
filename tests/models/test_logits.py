"""Every architecture and variant gives transformers' own logits, float32 on the CPU."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.forward import generate, load_model, logits_of, read_config
from support.tiny_models import ARCHITECTURES, write_tiny_model

PROMPT = torch.randint(3, 263, (60,), generator=torch.Generator().manual_seed(1)).tolist()

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama one KV head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama no groups": ("LlamaForCausalLM", {"num_key_value_heads": 8}),
    "llama wide heads": ("LlamaForCausalLM", {"head_dim": 16}),
    "llama gelu": ("LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama larger vocabulary": ("LlamaForCausalLM", {"vocab_size": 271}),
    "mistral without window": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2 without windows": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen2 layer types": (
        "Qwen2ForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2 tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3 windows": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "qwen3 biases untied": (
        "Qwen3ForCausalLM",
        {"attention_bias": True, "tie_word_embeddings": False},
    ),
    "moe not renormalized": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
    "moe every second layer": (
        "Qwen3MoeForCausalLM",
        {"decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "moe window": ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 12}),
    "moe one expert a token": ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 1}),
    "moe all experts": ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 6}),
    "moe gelu": ("Qwen3MoeForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "mixtral without window": ("MixtralForCausalLM", {"sliding_window": None}),
    "mixtral wide heads": ("MixtralForCausalLM", {"head_dim": 16}),
    "mixtral jitter": ("MixtralForCausalLM", {"router_jitter_noise": 0.5}),
    "qwen2 moe renormalized": ("Qwen2MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen2 moe every second layer": (
        "Qwen2MoeForCausalLM",
        {"decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "qwen2 moe without biases": ("Qwen2MoeForCausalLM", {"qkv_bias": False}),
    "qwen2 moe windows": (
        "Qwen2MoeForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen2 moe layer types": (
        "Qwen2MoeForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen2 moe gelu": ("Qwen2MoeForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "olmoe without limit": ("OlmoeForCausalLM", {"clip_qkv": None}),
    "olmoe no groups": ("OlmoeForCausalLM", {"num_key_value_heads": None}),
    "olmoe renormalized": ("OlmoeForCausalLM", {"norm_topk_prob": True}),
    "olmoe biases": ("OlmoeForCausalLM", {"attention_bias": True}),
    "olmoe tied": ("OlmoeForCausalLM", {"tie_word_embeddings": True}),
}

ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 4.0, 6.0, 8.0],
        "original_max_position_embeddings": 32,
    },
}


def assert_same_logits(folder, prompt=None, **options):
    reference = AutoModelForCausalLM.from_pretrained(folder)
    model, context = load_model(folder, **options)
    prompt = prompt or PROMPT
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert expected.std() > 0.5  # else a broken model would pass too
    torch.testing.assert_close(logits_of(model, context, prompt), expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(architecture, tmp_path):
    assert_same_logits(write_tiny_model(tmp_path, architecture))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_variant_equal_transformers(variant, tmp_path):
    architecture, overrides = VARIANTS[variant]
    assert_same_logits(write_tiny_model(tmp_path, architecture, **overrides))


@pytest.mark.parametrize("kind", ROPE)
def test_logits_with_scaled_rope_equal_transformers(kind, tmp_path):
    rope = {"rope_theta": 10000.0, **ROPE[kind]}
    assert_same_logits(write_tiny_model(tmp_path, "LlamaForCausalLM", rope_parameters=rope))


def test_longrope_within_the_original_context_takes_the_short_factors(tmp_path):
    rope = {"rope_theta": 10000.0, **ROPE["longrope"]}
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM", rope_parameters=rope)
    assert_same_logits(folder, PROMPT[:30], max_seq_len=32)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_decode_of_several_prompts_equals_transformers(architecture, tmp_path):
    folder = write_tiny_model(tmp_path, architecture)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    prompts = [PROMPT[:30], PROMPT[7:12], PROMPT[20:41]]
    model, context = load_model(folder, num_pages=80)
    outputs = generate(model, context, prompts, 16)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )[0, len(prompt) :].tolist()
        assert output[: len(expected)] == expected


def test_only_sampled_rows_get_logits(tmp_path):
    model, context = load_model(write_tiny_model(tmp_path, "LlamaForCausalLM"))
    everything = logits_of(model, context, PROMPT)
    from support.forward import make_batch

    batch = make_batch(context, [PROMPT], [0], decode=False)
    batch.sample_indices = torch.tensor([59, 3])
    with torch.inference_mode():
        some = model.forward(batch)
    assert some.shape == (2, 263)
    torch.testing.assert_close(some, everything[[59, 3]], rtol=1e-5, atol=1e-5)


def test_window_layers_are_read(tmp_path):
    folder = write_tiny_model(tmp_path, "Qwen2ForCausalLM")
    assert read_config(folder).sliding_windows == (None, 20, 20)


def test_unused_window_of_qwen2_is_not_respected(tmp_path):
    folder = write_tiny_model(tmp_path, "Qwen2ForCausalLM", use_sliding_window=False)
    assert read_config(folder).sliding_windows == (None, None, None)


def test_expert_layers_are_read(tmp_path):
    config = read_config(write_tiny_model(tmp_path, "Qwen3MoeForCausalLM"))
    assert config.moe is not None
    assert config.moe.layers == {0, 2}
