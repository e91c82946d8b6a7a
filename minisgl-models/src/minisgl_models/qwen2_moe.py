"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with routed experts beside one that all tokens visit."""

from typing import Any

from minisgl.models.config import ModelConfig
from minisgl_models.decoder import DecoderModel
from minisgl_models.experts import read_experts, sparse_layers
from minisgl_models.hf_config import Differences, read_decoder_config, windows_by_layer_type


class Qwen2MoeForCausalLM(DecoderModel):
    """The shared decoder; layers listed in ``config.moe.layers`` have experts."""


def read_config(config: Any) -> ModelConfig:
    """Read a ``Qwen2MoeConfig``.

    Raises:
        ModelLoadError: see ``read_decoder_config``, ``read_experts``, ``windows_by_layer_type``.
    """
    return read_decoder_config(
        config,
        Differences(
            attention_bias=bool(getattr(config, "qkv_bias", True)),
            sliding_windows=windows_by_layer_type(config),
            moe=read_experts(
                config,
                layers=sparse_layers(config),
                renormalize=bool(config.norm_topk_prob),
                shared_size=config.shared_expert_intermediate_size,
            ),
        ),
    )
