"""Tiny random checkpoints of every architecture, in the form that Hugging Face publishes them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_IDS = (2, 0)
VOCAB_SIZE = 263
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "OlmoeForCausalLM",
)

UNOFFERED_ARCHITECTURES = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GPT2LMHeadModel",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
)
"""Architectures of transformers that no plugin of ours offers: windows, soft caps, learned
positions, scales of their own, experts, norms behind the projections, q, k and v in one."""

_CONFIG_CLASSES = {
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "GPT2LMHeadModel": "GPT2Config",
    "GraniteForCausalLM": "GraniteConfig",
    "GraniteMoeForCausalLM": "GraniteMoeConfig",
    "Olmo2ForCausalLM": "Olmo2Config",
    "Phi3ForCausalLM": "Phi3Config",
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "Qwen2MoeForCausalLM": "Qwen2MoeConfig",
    "OlmoeForCausalLM": "OlmoeConfig",
}

_BASE_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_IDS[0],
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_EXTRA_CONFIG: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "Gemma3ForCausalLM": {
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "GPT2LMHeadModel": {"tie_word_embeddings": True},
    "GraniteForCausalLM": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
    },
    "GraniteMoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo2ForCausalLM": {},
    "Phi3ForCausalLM": {"sliding_window": 20},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 16, "tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "MixtralForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
    },
    "Qwen2MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "OlmoeForCausalLM": {
        "intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "clip_qkv": 2.0,
    },
}


WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 768,
    "initializer_range": 0.05,
}
"""Overrides that make a model large enough for every attention kernel."""


def write_tiny_model(folder: Path, architecture: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write ``config.json``, safetensors, ``generation_config.json`` and a tokenizer.

    The weights are random and spread wide enough that greedy outputs vary. ``overrides`` replace
    values of the transformers configuration. Returns ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = build_tiny_model(architecture, seed=seed, **overrides)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    generation = {"bos_token_id": 0, "eos_token_id": list(EOS_TOKEN_IDS), "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def build_tiny_model(architecture: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return the transformers model itself, in float32 and in evaluation mode."""
    values = {**_BASE_CONFIG, **_EXTRA_CONFIG[architecture], **overrides}
    config = getattr(transformers, _CONFIG_CLASSES[architecture])(**values)
    config.architectures = [architecture]
    config.dtype = "float32"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # transformers starts norms at one and biases at zero, which would hide mistakes.
                if name.endswith("norm.weight"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif name.endswith("bias"):
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


def write_tiny_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer of 263 tokens with a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
