"""Mixtral (Jiang et al., 2024): Mistral with routed experts in every layer."""

from typing import Any

from minisgl.errors import ModelLoadError
from minisgl.models.config import ModelConfig
from minisgl_models.decoder import DecoderModel
from minisgl_models.experts import MIXTRAL_NAMES, read_experts
from minisgl_models.hf_config import Differences, read_decoder_config


class MixtralForCausalLM(DecoderModel):
    """The shared decoder; all layers have experts."""


def read_config(config: Any) -> ModelConfig:
    """Read a ``MixtralConfig``; ``router_jitter_noise`` is for training alone.

    Raises:
        ModelLoadError: there are no experts, or see ``read_decoder_config`` and ``read_experts``.
    """
    if config.num_local_experts < 1:
        raise ModelLoadError(
            f"num_local_experts={config.num_local_experts} in config.json must be 1 or more; a "
            "model without experts has the architecture MistralForCausalLM"
        )
    window = getattr(config, "sliding_window", None)
    return read_decoder_config(
        config,
        Differences(
            sliding_windows=(window,) * config.num_hidden_layers,
            moe=read_experts(
                config,
                layers=frozenset(range(config.num_hidden_layers)),
                num_experts_field="num_local_experts",
                size_field="intermediate_size",
                renormalize=True,
                names=MIXTRAL_NAMES,
            ),
        ),
    )
