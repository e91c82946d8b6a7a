"""From a Hugging Face configuration to ``ModelConfig``: what all families share.

Reads transformers' configuration objects; both the ``rope_parameters`` of transformers 5 and the
older ``rope_theta`` with ``rope_scaling`` (and its older key ``type``) are understood.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.errors import ModelLoadError, nearest
from minisgl.layers.rope_config import RopeConfig
from minisgl.layers.rotary import ROPE_KINDS
from minisgl.models.config import ModelConfig, MoeConfig, QKNorm

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
}
"""transformers' name to ours; ``gelu`` is the tanh approximation, exact GELU is not offered."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""The types of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What a family does in its own way.

    Attributes:
        attention_bias: q, k and v have biases.
        output_bias: the attention output projection has a bias.
        mlp_bias: gate, up and down have biases.
        qk_norm: how q and k are normed.
        clip_qkv: limit of the absolute values of q, k and v.
        sliding_windows: per layer; empty means none anywhere.
        moe: routed experts.
    """

    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    clip_qkv: float | None = None
    sliding_windows: Sequence[int | None] = field(default=())
    moe: MoeConfig | None = None


def read_decoder_config(config: Any, differences: Differences) -> ModelConfig:
    """Return the ``ModelConfig`` of a transformers configuration.

    Raises:
        ModelLoadError: the activation or the kind of RoPE is not supported.
    """
    num_q_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_q_heads
    if config.hidden_act not in _ACTIVATIONS:
        raise ModelLoadError(
            f"hidden_act={config.hidden_act!r} in config.json is not supported; supported: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    rope = read_rope(config, head_dim)
    num_layers = config.num_hidden_layers
    return ModelConfig(
        architecture=config.architectures[0],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_q_heads,
        head_dim=head_dim,
        max_position=_max_position(config.max_position_embeddings, rope),
        rms_norm_eps=config.rms_norm_eps,
        activation=_ACTIVATIONS[config.hidden_act],
        tie_word_embeddings=bool(config.tie_word_embeddings),
        attention_bias=differences.attention_bias,
        output_bias=differences.output_bias,
        mlp_bias=differences.mlp_bias,
        qk_norm=differences.qk_norm,
        clip_qkv=differences.clip_qkv,
        sliding_windows=tuple(differences.sliding_windows) or (None,) * num_layers,
        dtype=_dtype(config),
        rope=rope,
        moe=differences.moe,
    )


def read_rope(config: Any, head_dim: int) -> RopeConfig:
    """Return the rotary embedding of a configuration, new form or old.

    Raises:
        ModelLoadError: the kind is unknown.
    """
    values = dict(getattr(config, "rope_scaling", None) or {})
    values.update(getattr(config, "rope_parameters", None) or {})
    theta = values.pop("rope_theta", None) or getattr(config, "rope_theta", None) or 10000.0
    old_name = values.pop("type", None)
    rope_type = values.pop("rope_type", None) or old_name or "default"
    if rope_type not in ROPE_KINDS:
        raise ModelLoadError(
            f"rope_type={rope_type!r} in config.json is not supported; supported: "
            f"{', '.join(sorted(ROPE_KINDS))}.{nearest(str(rope_type), ROPE_KINDS)}"
        )
    # transformers lets a configuration's own field win over the one in rope_parameters.
    inner = values.pop("original_max_position_embeddings", None)
    outer = getattr(config, "original_max_position_embeddings", None)
    original = outer or inner or config.max_position_embeddings
    if rope_type in ("yarn", "longrope") and values.get("factor") is None:
        values["factor"] = config.max_position_embeddings / original
    # transformers' plain RoPE of these families turns whole heads whatever this factor says, and
    # the proportional kind applies it by itself.
    share = values.get("partial_rotary_factor") or 1.0
    whole = rope_type in ("default", "proportional")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta),
        rotary_dim=head_dim if whole else int(head_dim * share),
        original_max_position=int(original),
        parameters=values,
    )


def windows_by_layer_type(config: Any) -> tuple[int | None, ...]:
    """Return each layer's sliding window as ``layer_types`` and ``sliding_window`` say.

    Without ``layer_types``, layers from ``max_window_layers`` on slide if ``use_sliding_window``.

    Raises:
        ModelLoadError: a layer is of another type, or slides and no window is in use.
    """
    window = config.sliding_window if getattr(config, "use_sliding_window", False) else None
    types = getattr(config, "layer_types", None)
    if types is None:
        first = config.max_window_layers
        return tuple(window if i >= first else None for i in range(config.num_hidden_layers))
    others = sorted(set(types) - {_FULL, _SLIDING})
    if others:
        raise ModelLoadError(
            f"layer_types in config.json has {', '.join(map(repr, others))}, which is not "
            f"supported; supported: {_FULL}, {_SLIDING}. Another plugin may offer the architecture "
            "(minisgl plugins list shows what is installed)"
        )
    if not window and _SLIDING in types:
        raise ModelLoadError(
            f"layer_types in config.json has {_SLIDING!r}, but no window is in use "
            f"(use_sliding_window={getattr(config, 'use_sliding_window', False)}, "
            f"sliding_window={config.sliding_window}); set both, or make the layers {_FULL!r}"
        )
    return tuple(window if kind == _SLIDING else None for kind in types)


def _max_position(max_position_embeddings: int, rope: RopeConfig) -> int:
    """Return the longest sequence: scaled kinds reach beyond ``max_position_embeddings``.

    ``llama3`` and ``longrope`` configurations state the scaled length themselves, and ``dynamic``
    is exact only up to the stated one.
    """
    if rope.rope_type == "linear":
        return int(max_position_embeddings * rope.parameters.get("factor", 1.0))
    if rope.rope_type == "yarn":
        scaled = int(rope.original_max_position * rope.parameters["factor"])
        return max(max_position_embeddings, scaled)
    return max_position_embeddings


def _dtype(config: Any) -> str:
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "float32"
    return str(dtype).removeprefix("torch.")
