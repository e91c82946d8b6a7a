"""Mistral (Jiang et al., 2023): every layer slides over the last ``sliding_window`` tokens."""

from typing import Any

from minisgl.models.config import ModelConfig
from minisgl_models.decoder import DecoderModel
from minisgl_models.hf_config import Differences, read_decoder_config


class MistralForCausalLM(DecoderModel):
    """The shared decoder as it is."""


def read_config(config: Any) -> ModelConfig:
    """Read a ``MistralConfig``; ``sliding_window`` of ``None`` means full attention."""
    window = getattr(config, "sliding_window", None)
    windows = (window,) * config.num_hidden_layers
    return read_decoder_config(config, Differences(sliding_windows=windows))
