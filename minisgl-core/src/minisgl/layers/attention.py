"""The attention layer: project, rotate, store K and V, attend, project back."""

from typing import Literal

import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionLayerSpec
from minisgl.kernel.rotation import Rotation
from minisgl.layers.base import Layer
from minisgl.layers.context import BuildContext
from minisgl.layers.linear import Hidden, QKVLinear, RowLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.qk_norm import WholeQKNorm


class Attention(Layer):
    """Grouped-query attention (Ainslie et al., 2023) over the paged pool.

    Args:
        index: number of the layer in the KV pool.
        hidden_size: elements of a hidden state.
        num_q_heads, num_kv_heads, head_dim: of the whole model, before sharding.
        context: the surroundings.
        prefix: of the checkpoint names, such as ``model.layers.0.self_attn``.
        qkv_bias, output_bias: which projections have biases.
        qk_norm: norm of q and k before the rotation: of each head, of all heads at once, or none.
        qk_norm_eps: of that norm.
        clip_qkv: limit of the absolute values of q, k and v before the rotation.
        sliding_window: tokens that a query sees, or ``None`` for all before it.
    """

    def __init__(
        self,
        index: int,
        hidden_size: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        context: BuildContext,
        prefix: str,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: Literal["heads", "whole"] | None = None,
        qk_norm_eps: float = 0.0,
        clip_qkv: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.qkv = QKVLinear(
            hidden_size,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context=context,
            prefix=prefix,
            bias=qkv_bias,
        )
        self.output = RowLinear(
            num_q_heads * head_dim, hidden_size, context, f"{prefix}.o_proj", bias=output_bias
        )
        self.q_norm = self.k_norm = None
        self._q_norm_weight = self._k_norm_weight = None
        self._norm_eps = qk_norm_eps
        self.whole_norm: WholeQKNorm | None = None
        if qk_norm == "whole":
            self.whole_norm = WholeQKNorm(
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                eps=qk_norm_eps,
                context=context,
                prefix=prefix,
            )
        elif qk_norm == "heads":
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, context, f"{prefix}.q_norm")
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, context, f"{prefix}.k_norm")
            self._q_norm_weight, self._k_norm_weight = self.q_norm.weight, self.k_norm.weight
        self.spec = AttentionLayerSpec(
            index=index,
            num_q_heads=self.qkv.num_q_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            sliding_window=sliding_window,
        )
        self._num_q_heads = self.qkv.num_q_heads
        self._num_kv_heads = self.qkv.num_kv_heads
        self._num_qk_heads = self._num_q_heads + self._num_kv_heads
        self._heads_shape = (-1, self._num_qk_heads + self._num_kv_heads, head_dim)
        self._output_shape = (-1, self._num_q_heads * head_dim)
        local_heads = (self._num_q_heads, self._num_kv_heads, self._num_kv_heads)
        self._qkv_sizes = [num * head_dim for num in local_heads]
        self._clip_qkv = clip_qkv
        self._rope = context.ops.rope
        self._rope_store = context.ops.rope_store
        self._attention = context.attention
        self._kv_pool = context.kv_pool

    def forward(self, hidden: torch.Tensor, batch: Batch, rotation: Rotation) -> torch.Tensor:
        """``[T, hidden]`` to the same shape; stores K and V of the tokens on the way."""
        return self.output.forward(self._attend(self.qkv.forward(hidden), batch, rotation))

    def after_norm(
        self,
        x: Hidden,
        residual: torch.Tensor | None,
        norm: RMSNorm,
        batch: Batch,
        rotation: Rotation,
        *,
        wanted: torch.Tensor | None = None,
    ) -> tuple[Hidden, torch.Tensor]:
        """Return ``forward(norm(x + residual))``, maybe in parts, and the sum.

        Of the tokens ``wanted`` alone, int64 ``[S]``, if given; K and V of all are stored.
        """
        qkv, residual = self.qkv.after_norm(x, residual, norm)
        heads = self._attend(qkv, batch, rotation)
        if wanted is not None:
            heads, residual = heads[wanted], residual[wanted]
        return self.output.parts(heads), residual

    def _attend(self, qkv: torch.Tensor, batch: Batch, rotation: Rotation) -> torch.Tensor:
        """Return the heads' outputs side by side, ``[T, q_heads * head_dim]``."""
        if self.whole_norm is not None:
            q, k, v = torch.split(qkv, self._qkv_sizes, dim=-1)
            qkv = torch.cat((*self.whole_norm.forward(q, k), v), dim=-1)
        if self._clip_qkv is not None:
            qkv = qkv.clamp(-self._clip_qkv, self._clip_qkv)
        heads = qkv.view(self._heads_shape)
        if self._attention.store_fusion:
            q, k = self._rotate(heads, rotation)
            new_kv = (k, heads[:, self._num_qk_heads :])
            out = self._attention.attend(q, self.spec, batch.plan, new_kv)
        else:
            q = self._rotate_and_store(heads, batch.slots, rotation)
            out = self._attention.attend(q, self.spec, batch.plan)
        return out.reshape(self._output_shape)

    def _rotate_and_store(
        self, heads: torch.Tensor, slots: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Return the rotated q; one operation if the pool is plain tensors."""
        flat = self._kv_pool.flat_layer(self.spec.index)
        if flat is None:
            q, k = self._rotate(heads, rotation)
            self._kv_pool.store(k, heads[:, self._num_qk_heads :], slots, self.spec.index)
            return q
        return self._rope_store(
            heads,
            self._num_q_heads,
            self._num_kv_heads,
            rotation,
            slots,
            *flat,
            q_norm=self._q_norm_weight,
            k_norm=self._k_norm_weight,
            norm_eps=self._norm_eps,
        )

    def _rotate(self, heads: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rope(
            heads[:, : self._num_qk_heads],
            self._num_q_heads,
            rotation,
            q_norm=self._q_norm_weight,
            k_norm=self._k_norm_weight,
            norm_eps=self._norm_eps,
        )
