"""The backend: routes, then runs the launch that belongs to the number of tokens."""

from collections.abc import Sequence

import torch

from minisgl.moe import MoeBackend, MoeContext
from minisgl_moe_triton.configs import Few, Launch, choose
from minisgl_moe_triton.few import few_down, few_gate_up
from minisgl_moe_triton.grouped import down, gate_up, sum_parts
from minisgl_moe_triton.routing import Routed, route, sort_by_expert


class TritonMoeBackend(MoeBackend):
    """Runs experts in Triton; no shape depends on the routing, and nothing synchronises.

    Args:
        context: sizes of the layers.
        launches: at least one, by ascending number of tokens.
    """

    cuda_graphs = True

    def __init__(self, context: MoeContext, launches: Sequence[Launch]) -> None:
        self._top_k = context.top_k
        self._gelu = context.activation == "gelu"
        self._launches = tuple(launches)
        self._chosen: dict[int, Launch] = {}

    def forward(
        self,
        hidden: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        renormalize: bool,
    ) -> torch.Tensor:
        """Route, then run each expert on its tokens; see the interface for shapes."""
        tokens = len(hidden)
        if not tokens:
            return torch.empty_like(hidden)
        launch = self._chosen.get(tokens)
        if launch is None:
            launch = self._chosen[tokens] = choose(self._launches, tokens)
        routed = route(router_logits, self._top_k, hidden.dtype, renormalize=renormalize)
        return run_experts(hidden.contiguous(), routed, gate_up, down, launch, gelu=self._gelu)


def run_experts(
    hidden: torch.Tensor,
    routed: Routed,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    launch: Launch,
    *,
    gelu: bool,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts, ``[T, hidden]``; -1 chooses none.

    Args:
        hidden: ``[T, hidden]``, contiguous.
        routed: experts and weights of each token.
        gate_up_weight: ``[E, 2 * inner, hidden]``, contiguous.
        down_weight: ``[E, hidden, inner]``, contiguous.
        launch: how.
        gelu: the activation; else SiLU.
    """
    experts = routed.experts
    if isinstance(launch, Few):
        rows = few_gate_up(hidden, gate_up_weight, experts, launch.gate_up, gelu=gelu)
        return few_down(rows, down_weight, experts, routed.weights, launch.down)
    tiles = sort_by_expert(experts, len(gate_up_weight), launch.rows)
    top_k = experts.shape[1]
    rows = gate_up(hidden, gate_up_weight, tiles, top_k, launch.gate_up, gelu=gelu)
    parts = down(rows, down_weight, routed.weights, tiles, launch.down)
    return sum_parts(parts, experts)
