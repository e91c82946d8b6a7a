"""Qwen3, dense and with routed experts: heads of q and k are normed before the rotation."""

from typing import Any

from minisgl.models.config import ModelConfig
from minisgl_models.decoder import DecoderModel
from minisgl_models.experts import read_experts, sparse_layers
from minisgl_models.hf_config import Differences, read_decoder_config, windows_by_layer_type


class Qwen3ForCausalLM(DecoderModel):
    """The shared decoder as it is."""


class Qwen3MoeForCausalLM(DecoderModel):
    """The shared decoder; layers listed in ``config.moe.layers`` have experts."""


def read_config(config: Any) -> ModelConfig:
    """Read a ``Qwen3Config``; ``attention_bias`` counts for the output projection too."""
    bias = bool(getattr(config, "attention_bias", False))
    return read_decoder_config(
        config,
        Differences(
            attention_bias=bias,
            output_bias=bias,
            qk_norm="heads",
            sliding_windows=windows_by_layer_type(config),
        ),
    )


def read_moe_config(config: Any) -> ModelConfig:
    """Read a ``Qwen3MoeConfig``; a sliding window, if used, counts for all layers."""
    bias = bool(getattr(config, "attention_bias", False))
    window = config.sliding_window if getattr(config, "use_sliding_window", False) else None
    return read_decoder_config(
        config,
        Differences(
            attention_bias=bias,
            output_bias=bias,
            qk_norm="heads",
            sliding_windows=(window,) * config.num_hidden_layers,
            moe=read_experts(
                config, layers=sparse_layers(config), renormalize=bool(config.norm_topk_prob)
            ),
        ),
    )
