"""The facts about a model that engine, scheduler and layers need. Imports no torch."""

from dataclasses import dataclass

from minisgl.layers.rope_config import RopeConfig

__all__ = ["ModelConfig", "ModelFacts", "MoeConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts of a model.

    Attributes:
        num_experts: routed experts a layer.
        top_k: experts a token.
        intermediate_size: inner elements of one expert.
        renormalize: divide the chosen experts' weights by their sum.
        layers: numbers of the layers that have experts.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    layers: frozenset[int]


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
        qk_norm: q and k heads are RMS-normed before the rotation.
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
    qk_norm: bool
    rope: RopeConfig
    moe: MoeConfig | None = None
