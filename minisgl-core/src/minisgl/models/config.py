"""The facts about a model that engine, scheduler and layers need. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from minisgl.layers.moe_config import ExpertNames, MoeConfig
from minisgl.layers.rope_config import RopeConfig

__all__ = ["ExpertNames", "ModelConfig", "ModelFacts", "MoeConfig", "QKNorm", "RopeConfig"]

QKNorm = Literal["heads", "whole"]
"""What one norm of q, or of k, covers: each head, or all heads as one vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What engine and scheduler must know of any decoder-only model, however it computes.

    Attributes:
        architecture: name as in ``config.json``.
        vocab_size: number of logits.
        num_layers: layers that store K and V.
        num_q_heads, num_kv_heads, head_dim: of each layer, before sharding.
        max_position: longest sequence the model was made for, scaling included.
        sliding_windows: per layer, tokens a query sees, or ``None`` for all.
        logit_soft_cap: some layer caps its attention scores.
        dtype: of the checkpoint, such as ``bfloat16``.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    sliding_windows: tuple[int | None, ...]
    logit_soft_cap: bool = False
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelFacts):
    """One decoder-only model, for those who build it out of core's layers.

    Attributes:
        hidden_size, intermediate_size: as usual.
        rms_norm_eps: of all norms.
        activation: ``silu`` or ``gelu``, of the MLP's gate.
        tie_word_embeddings: the head is the embedding.
        attention_bias: q, k and v have biases.
        output_bias: the attention output projection has a bias.
        mlp_bias: gate, up and down have biases.
        qk_norm: how q and k are RMS-normed before the rotation, or ``None``.
        clip_qkv: limit of the absolute values of q, k and v before the rotation, or ``None``.
        rope: rotary embedding.
        moe: routed experts, or ``None`` for a dense model.
    """

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm | None
    rope: RopeConfig
    clip_qkv: float | None = None
    moe: MoeConfig | None = None
