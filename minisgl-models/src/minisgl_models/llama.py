"""Llama: optional biases everywhere, no windows."""

from typing import Any

from minisgl.models.config import ModelConfig
from minisgl_models.decoder import DecoderModel
from minisgl_models.hf_config import Differences, read_decoder_config


class LlamaForCausalLM(DecoderModel):
    """The shared decoder as it is."""


def read_config(config: Any) -> ModelConfig:
    """Read a ``LlamaConfig``; its ``attention_bias`` counts for the output projection too."""
    bias = bool(getattr(config, "attention_bias", False))
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    return read_decoder_config(
        config, Differences(attention_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    )
