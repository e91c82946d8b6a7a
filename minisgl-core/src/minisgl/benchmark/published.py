"""``config.json`` of published models, as their publishers wrote it: shapes to measure with.

With ``--load-format dummy`` such a folder is all that a benchmark needs: weights are random, and
``bench offline`` feeds token ids.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from minisgl.errors import SettingsError, nearest

_QWEN3: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
)

_LLAMA3: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    }
)


_QWEN2_MOE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
)

_MIXTRAL: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    }
)

_OLMOE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 50304,
    }
)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> Any:
    return MappingProxyType(
        {
            **_QWEN3,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "max_window_layers": layers,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "tie_word_embeddings": tied,
        }
    )


def _llama3_scaling(factor: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
        "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
        "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
        "Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
        "Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
        "Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
        "Qwen3-30B-A3B": {
            **_qwen3(2048, 6144, 48, 32, tied=False),
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
        },
        "Qwen1.5-MoE-A2.7B": _QWEN2_MOE,
        "Mixtral-8x7B": _MIXTRAL,
        "OLMoE-1B-7B": _OLMOE,
        "Llama-3.1-8B": {
            **_LLAMA3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "rope_scaling": _llama3_scaling(8.0),
            "tie_word_embeddings": False,
            "transformers_version": "4.43.0.dev0",
        },
        "Llama-3.2-1B": {
            **_LLAMA3,
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "rope_scaling": _llama3_scaling(32.0),
            "tie_word_embeddings": True,
            "transformers_version": "4.45.0.dev0",
        },
    }
)
"""By the name that the publisher gave the model."""


def published_config(name: str) -> Mapping[str, Any]:
    """Return the configuration of a model.

    Raises:
        SettingsError: its name is none of ``CONFIGS``.
    """
    if name not in CONFIGS:
        raise SettingsError(
            f"no configuration of {name!r} is known; known: {', '.join(CONFIGS)}."
            f"{nearest(name, CONFIGS)}"
        )
    return CONFIGS[name]


def write_config(name: str, folder: Path) -> Path:
    """Write the ``config.json`` of a model into ``folder``, which is made if need be; return it.

    Raises:
        SettingsError: the name is unknown, another ``config.json`` is there already, or no folder
            can be made.
    """
    text = json.dumps(dict(sorted(published_config(name).items())), indent=2) + "\n"
    file = folder / "config.json"
    try:
        if file.exists() and file.read_bytes() != text.encode():
            raise SettingsError(f"{str(file)!r} exists and is another one; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"{str(file)!r} cannot be written: {error.strerror}; name another folder"
        ) from error
    return file
