"""The decoder that all families share: pre-norm blocks of attention and a gated MLP or experts.

What differs between families is data in ``ModelConfig``; their modules only read it from the
configuration.
"""

import torch

from minisgl.attention.batch import Batch
from minisgl.kernel.rotation import Rotation
from minisgl.layers.attention import Attention
from minisgl.layers.base import Layer
from minisgl.layers.context import BuildContext
from minisgl.layers.embedding import LMHead, VocabEmbedding
from minisgl.layers.gated_mlp import GatedMLP
from minisgl.layers.linear import Hidden
from minisgl.layers.moe import MoeLayer
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RotaryEmbedding
from minisgl.models.config import ModelConfig
from minisgl.models.interface import BaseLLMModel


class DecoderBlock(Layer):
    """One layer: attention, then MLP, each behind a norm and added to the residual."""

    def __init__(self, index: int, config: ModelConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, context, f"{prefix}.input_layernorm")
        self.attention = Attention(
            index,
            size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            context=context,
            prefix=f"{prefix}.self_attn",
            qkv_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm=config.qk_norm,
            qk_norm_eps=eps,
            clip_qkv=config.clip_qkv,
            sliding_window=config.sliding_windows[index],
        )
        self.mlp_norm = RMSNorm(size, eps, context, f"{prefix}.post_attention_layernorm")
        self.mlp = _mlp(index, config, context, prefix)

    def forward(
        self,
        hidden: Hidden,
        residual: torch.Tensor | None,
        batch: Batch,
        rotation: Rotation,
        *,
        wanted: torch.Tensor | None = None,
    ) -> tuple[Hidden, torch.Tensor]:
        """Return the MLP's output and the residual that it is still to be added to.

        Of the tokens ``wanted`` alone, int64 ``[S]``, if given: nobody reads the others behind the
        last layer.
        """
        hidden, residual = self.attention.after_norm(
            hidden, residual, self.input_norm, batch, rotation, wanted=wanted
        )
        return self.mlp.after_norm(hidden, residual, self.mlp_norm)


class DecoderModel(BaseLLMModel):
    """Embedding, blocks, norm and head, with the checkpoint names of Llama."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        vocab, size = config.vocab_size, config.hidden_size
        tied = config.tie_word_embeddings
        self.embedding = VocabEmbedding(vocab, size, context, "model.embed_tokens", tied=tied)
        self.rotary = RotaryEmbedding(config.rope, context)
        self.blocks = [
            DecoderBlock(index, config, context, f"model.layers.{index}")
            for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(size, config.rms_norm_eps, context, "model.norm")
        tied_to = self.embedding if tied else None
        self.head = LMHead(vocab, size, context, "lm_head", tied_to=tied_to)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the sampled tokens, ``[S, vocab_size]``."""
        hidden: Hidden = self.embedding.forward(batch.input_ids)
        rotation = self.rotary.forward(batch.positions)
        residual = None
        for block in self.blocks[:-1]:
            hidden, residual = block.forward(hidden, residual, batch, rotation)
        last = self.blocks[-1]
        hidden, residual = last.forward(
            hidden, residual, batch, rotation, wanted=batch.sample_indices
        )
        normed, _ = self.norm.add_and_norm(hidden, residual)
        return self.head.forward(normed)


def _mlp(
    index: int, config: ModelConfig, context: BuildContext, prefix: str
) -> GatedMLP | MoeLayer:
    if config.moe is not None and index in config.moe.layers:
        return MoeLayer(config.hidden_size, config.activation, config.moe, context, prefix)
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        config.activation,
        context,
        f"{prefix}.mlp",
        bias=config.mlp_bias,
    )
