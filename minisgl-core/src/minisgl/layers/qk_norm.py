"""The norm of q and k over all of their heads at once."""

import torch

from minisgl.layers.base import Layer, Piece, shard_heads
from minisgl.layers.context import BuildContext


class WholeQKNorm(Layer):
    """RMSNorm of q, all heads as one vector, and of k (OLMoE; Muennighoff et al., 2024).

    Heads are sharded, so the ranks add up their sums of squares. Reads ``q_norm`` and ``k_norm``
    under ``prefix``.
    """

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        context: BuildContext,
        prefix: str,
    ) -> None:
        super().__init__()
        self._eps = eps
        self._rms_norm = context.ops.rms_norm
        self._communicator = context.communicator
        ranks = context.communicator
        shards = shard_heads(num_q_heads, num_kv_heads, ranks.rank, ranks.size)
        self.q_weight, self.k_weight = (
            self.declare(
                f"{name}_weight",
                (len(heads) * head_dim,),
                [
                    Piece(
                        f"{prefix}.{name}_norm.weight",
                        (total * head_dim,),
                        (slice(heads.start * head_dim, heads.stop * head_dim),),
                        (slice(0, len(heads) * head_dim),),
                    )
                ],
                context,
                dummy="ones",
            )
            for name, total, heads in zip(
                ("q", "k"), (num_q_heads, num_kv_heads), shards, strict=True
            )
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both normed; ``[T, heads * head_dim]`` of this rank."""
        if self._communicator.size == 1:
            return (
                self._rms_norm(q, self.q_weight, self._eps),
                self._rms_norm(k, self.k_weight, self._eps),
            )
        # Every rank holds equally many heads; where ranks share KV heads, each counts as often.
        means = torch.stack([part.float().square().mean(dim=-1) for part in (q, k)])
        means = self._communicator.all_reduce(means) / self._communicator.size
        q_scale, k_scale = (means + self._eps).rsqrt().unsqueeze(-1).unbind(0)
        return (
            (q.float() * q_scale).to(q.dtype) * self.q_weight,
            (k.float() * k_scale).to(k.dtype) * self.k_weight,
        )
