"""OLMoE (Muennighoff et al., 2024): q and k are normed over all heads, all layers have experts."""

from typing import Any

from minisgl.errors import ModelLoadError
from minisgl.models.config import ModelConfig
from minisgl_models.decoder import DecoderModel
from minisgl_models.experts import read_experts
from minisgl_models.hf_config import Differences, read_decoder_config


class OlmoeForCausalLM(DecoderModel):
    """The shared decoder; all layers have experts."""


def read_config(config: Any) -> ModelConfig:
    """Read an ``OlmoeConfig``; ``attention_bias`` counts for the output projection too.

    Raises:
        ModelLoadError: it names what OLMoE has not, or see ``read_decoder_config`` and
            ``read_experts``.
    """
    if config.num_experts < 1:
        raise ModelLoadError(
            f"num_experts={config.num_experts} in config.json must be 1 or more: all layers of "
            "OlmoeForCausalLM have experts"
        )
    if getattr(config, "sliding_window", None) is not None:
        raise ModelLoadError(
            f"sliding_window={config.sliding_window} in config.json is not supported: "
            "OlmoeForCausalLM attends to all tokens; remove it"
        )
    head_dim, plain = (
        getattr(config, "head_dim", None),
        config.hidden_size // config.num_attention_heads,
    )
    if head_dim not in (None, plain):
        raise ModelLoadError(
            f"head_dim={head_dim} in config.json is not supported: the norms of q and k of "
            f"OlmoeForCausalLM are as wide as hidden_size, so it must be {plain}"
        )
    clip = config.clip_qkv
    if clip is not None and clip < 0:
        raise ModelLoadError(
            f"clip_qkv={clip} in config.json must be 0 or more, or null for no limit"
        )
    bias = bool(getattr(config, "attention_bias", False))
    return read_decoder_config(
        config,
        Differences(
            attention_bias=bias,
            output_bias=bias,
            qk_norm="whole",
            clip_qkv=clip,
            moe=read_experts(
                config,
                layers=frozenset(range(config.num_hidden_layers)),
                size_field="intermediate_size",
                renormalize=bool(config.norm_topk_prob),
            ),
        ),
    )
