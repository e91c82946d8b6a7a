"""Routed experts: the router, the stacked expert weights, and the MoE backend's call."""

import torch

from minisgl.layers.base import Layer, Piece, shard_range, shard_size
from minisgl.layers.context import BuildContext
from minisgl.layers.linear import Hidden, ReplicatedLinear
from minisgl.layers.norm import RMSNorm


class MoeLayer(Layer):
    """A sparse mixture of experts (Shazeer et al., 2017), each expert sharded over all ranks.

    Reads ``gate`` (the router) and ``experts.N.{gate,up,down}_proj`` under ``prefix``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        context: BuildContext,
        prefix: str,
        *,
        renormalize: bool,
    ) -> None:
        super().__init__()
        assert context.moe is not None, "a model with experts is built with an MoE backend"
        self._backend = context.moe
        self._communicator = context.communicator
        self._renormalize = renormalize
        self.router = ReplicatedLinear(hidden_size, num_experts, context, f"{prefix}.gate")
        rank, ranks = context.communicator.rank, context.communicator.size
        start, stop = shard_range(intermediate_size, rank, ranks)
        local = shard_size(intermediate_size, ranks)
        taken = slice(start, stop)
        gate_up, down = [], []
        for expert in range(num_experts):
            name = f"{prefix}.experts.{expert}"
            for projection, offset in (("gate_proj", 0), ("up_proj", local)):
                target = (expert, slice(offset, offset + stop - start))
                shape = (intermediate_size, hidden_size)
                gate_up.append(Piece(f"{name}.{projection}.weight", shape, (taken,), target))
            every = slice(0, hidden_size)
            down.append(
                Piece(
                    f"{name}.down_proj.weight",
                    (hidden_size, intermediate_size),
                    (every, taken),
                    (expert, every, slice(0, stop - start)),
                )
            )
        self.gate_up = self.declare(
            "gate_up", (num_experts, 2 * local, hidden_size), gate_up, context, matrix=True
        )
        self.down = self.declare(
            "down", (num_experts, hidden_size, local), down, context, matrix=True
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to the same shape, summed over the ranks."""
        out = self._backend.forward(
            hidden,
            self.router.forward(hidden),
            self.gate_up,
            self.down,
            renormalize=self._renormalize,
        )
        return out if self._communicator.size == 1 else self._communicator.all_reduce(out)

    def after_norm(
        self, x: Hidden, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[Hidden, torch.Tensor]:
        """Return ``forward(norm(x + residual))`` and the sum."""
        hidden, residual = norm.add_and_norm(x, residual)
        return self.forward(hidden), residual
