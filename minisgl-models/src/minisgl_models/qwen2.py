"""Qwen2 and Qwen2.5: biases on q, k and v alone; some layers may slide."""

from typing import Any

from minisgl.models.config import ModelConfig
from minisgl_models.decoder import DecoderModel
from minisgl_models.hf_config import Differences, read_decoder_config, windows_by_layer_type


class Qwen2ForCausalLM(DecoderModel):
    """The shared decoder as it is."""


def read_config(config: Any) -> ModelConfig:
    """Read a ``Qwen2Config``."""
    windows = windows_by_layer_type(config)
    return read_decoder_config(config, Differences(attention_bias=True, sliding_windows=windows))
