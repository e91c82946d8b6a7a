"""Routed experts: the router, the stacked expert weights, and the MoE backend's call."""

import torch

from minisgl.layers.base import Layer, Piece, shard_range, shard_size
from minisgl.layers.context import BuildContext
from minisgl.layers.gated_mlp import GatedMLP
from minisgl.layers.linear import Hidden, ReplicatedLinear
from minisgl.layers.moe_config import MoeConfig
from minisgl.layers.norm import RMSNorm
from minisgl.moe.fp8 import ExpertScales
from minisgl.moe.placement import ExpertPlacement

_STACKED = "mlp"
"""The block of experts in checkpoints that hold them as transformers 5 does in memory."""


class MoeLayer(Layer):
    """A sparse mixture of experts (Shazeer et al., 2017), spread over ranks by ``ExpertPlacement``.

    Reads, below the ``prefix`` of the decoder layer, the router and a tensor for each expert's
    projections by ``config.names``; or, if the checkpoint has them, ``mlp.gate`` and the stacks
    ``mlp.experts.gate_up_proj`` and ``mlp.experts.down_proj`` of transformers 5.
    """

    def __init__(
        self,
        hidden_size: int,
        activation: str,
        config: MoeConfig,
        context: BuildContext,
        prefix: str,
    ) -> None:
        super().__init__()
        assert context.moe is not None, "a model with experts is built with an MoE backend"
        self._backend = context.moe
        self._exchange = context.exchange
        self._communicator = context.communicator
        ranks = context.communicator
        placement = ExpertPlacement(config.num_experts, ranks.size, context.expert_parallel_size)
        self._experts = placement.experts_of(ranks.rank)
        self._part, self._num_parts = placement.part_of(ranks.rank), placement.ranks_per_group
        self._renormalize = config.renormalize
        self._hidden_size = hidden_size
        self._config = config
        self._prefix = prefix
        self.router = ReplicatedLinear(
            hidden_size, config.num_experts, context, f"{prefix}.{config.names.block}.gate"
        )
        held, inner = len(self._experts), shard_size(config.intermediate_size, self._num_parts)
        self._local_inner = inner
        gate_up, down = self._pieces_by_expert()
        of_gate_up, of_down = (held, 2 * inner, hidden_size), (held, hidden_size, inner)
        self._scales: dict[str, ExpertScales] = {}
        """What backends are given beside quantized experts, and not given beside others."""
        if context.moe_weights_dtype is None:
            self.gate_up = self.declare("gate_up", of_gate_up, gate_up, context, matrix=True)
            self.down = self.declare("down", of_down, down, context, matrix=True)
        else:
            self.gate_up, first = self.declare_quantized("gate_up", of_gate_up, gate_up, context)
            self.down, second = self.declare_quantized("down", of_down, down, context)
            self._scales["scales"] = ExpertScales(first, second)
        self.shared: SharedExpert | None = None
        if config.shared_intermediate_size is not None:
            self.shared = SharedExpert(
                hidden_size, config.shared_intermediate_size, activation, context, f"{prefix}.mlp"
            )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to the same shape, summed over the ranks."""
        logits = self.router.forward(hidden)
        partial = None if self.shared is None else self.shared.partial(hidden)
        if self._exchange is not None:
            weights, experts = self._backend.route(logits, renormalize=self._renormalize)
            tokens = self._exchange.dispatch(hidden, weights, experts)
            out = self._backend.run_experts(
                tokens.hidden,
                tokens.weights,
                tokens.experts,
                self.gate_up,
                self.down,
                **self._scales,
            )
            return self._exchange.combine(out, tokens, partial)
        out = self._backend.forward(
            hidden,
            logits,
            self.gate_up,
            self.down,
            renormalize=self._renormalize,
            **self._scales,
        )
        if partial is not None:
            out = out + partial
        return out if self._communicator.size == 1 else self._communicator.all_reduce(out)

    def after_norm(
        self, x: Hidden, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[Hidden, torch.Tensor]:
        """Return ``forward(norm(x + residual))`` and the sum."""
        hidden, residual = norm.add_and_norm(x, residual)
        return self.forward(hidden), residual

    def prepare_loading(self, names: frozenset[str]) -> None:
        """Take stacked experts, and the router beside them, if the checkpoint holds those."""
        router = f"{self._prefix}.{_STACKED}.gate"
        if f"{router}.weight" in names:
            self.router.rename(router)
        if self._stack("gate_up_proj") in names:
            gate_up, down = self._pieces_of_stacks()
            self.replace_pieces("gate_up", gate_up)
            self.replace_pieces("down", down)

    def _pieces_by_expert(self) -> tuple[list[Piece], list[Piece]]:
        """Return what fills gate and up, and what fills down, from a tensor for each expert.

        Experts of other ranks are among them, and fill nothing: the checkpoint must have all.
        """
        names, inner, hidden = self._config.names, self._config.intermediate_size, self._hidden_size
        gate_up, down = [], []
        for expert in range(self._config.num_experts):
            name = f"{self._prefix}.{names.block}.experts.{expert}"
            held = expert in self._experts
            place = expert - self._experts.start if held else 0
            taken = slice(*self._inner_range()) if held else slice(0, 0)
            for projection, first in ((names.gate, 0), (names.up, self._local_inner)):
                rows = slice(first, first + taken.stop - taken.start)
                gate_up.append(
                    Piece(f"{name}.{projection}.weight", (inner, hidden), (taken,), (place, rows))
                )
            every, columns = slice(0, hidden), slice(0, taken.stop - taken.start)
            down.append(
                Piece(
                    f"{name}.{names.down}.weight",
                    (hidden, inner),
                    (every, taken),
                    (place, every, columns),
                )
            )
        return gate_up, down

    def _pieces_of_stacks(self) -> tuple[list[Piece], list[Piece]]:
        """Return the same from the two tensors that stack all experts."""
        experts, inner = self._config.num_experts, self._config.intermediate_size
        start, stop = self._inner_range()
        held, places = slice(self._experts.start, self._experts.stop), slice(0, len(self._experts))
        every = slice(0, self._hidden_size)
        gate_up = [
            Piece(
                self._stack("gate_up_proj"),
                (experts, 2 * inner, self._hidden_size),
                (held, slice(offset + start, offset + stop)),
                (places, rows),
            )
            for offset, rows in (
                (0, slice(0, stop - start)),
                (inner, slice(self._local_inner, self._local_inner + stop - start)),
            )
        ]
        down = Piece(
            self._stack("down_proj"),
            (experts, self._hidden_size, inner),
            (held, every, slice(start, stop)),
            (places, every, slice(0, stop - start)),
        )
        return gate_up, [down]

    def _stack(self, projection: str) -> str:
        return f"{self._prefix}.{_STACKED}.experts.{projection}"

    def _inner_range(self) -> tuple[int, int]:
        """Return the inner elements of an expert that this rank takes."""
        return shard_range(self._config.intermediate_size, self._part, self._num_parts)


class SharedExpert(Layer):
    """An expert that every token visits, times the sigmoid of a gate of its own (Qwen2-MoE).

    Reads ``shared_expert.{gate,up,down}_proj`` and ``shared_expert_gate`` under ``prefix``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        context: BuildContext,
        prefix: str,
    ) -> None:
        super().__init__()
        self.mlp = GatedMLP(
            hidden_size, intermediate_size, activation, context, f"{prefix}.shared_expert"
        )
        self.gate = ReplicatedLinear(hidden_size, 1, context, f"{prefix}.shared_expert_gate")

    def partial(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to the same shape: what this rank adds to the sum over the ranks."""
        return self.gate.forward(hidden).sigmoid() * self.mlp.partial(hidden)
