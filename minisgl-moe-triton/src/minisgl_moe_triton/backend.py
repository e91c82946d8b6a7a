"""The backend: routes, then runs the launch that belongs to the number of tokens."""

from collections.abc import Sequence

import torch

from minisgl.moe import ExpertScales, MoeBackend, MoeContext
from minisgl_moe_triton.configs import Few, Launch, choose
from minisgl_moe_triton.kernels.few import few_down, few_gate_up
from minisgl_moe_triton.kernels.grouped import down, gate_up, sum_parts
from minisgl_moe_triton.kernels.quantize import operand
from minisgl_moe_triton.kernels.routing import Routed, route, sort_by_expert


class TritonMoeBackend(MoeBackend):
    """Runs experts in Triton; no shape depends on the routing, and nothing synchronises.

    Args:
        context: sizes of the layers.
        launches: at least one, by ascending number of tokens.
    """

    cuda_graphs = True

    def __init__(self, context: MoeContext, launches: Sequence[Launch]) -> None:
        super().__init__(context)
        self._first_expert = context.local_experts.start
        self._gelu = context.activation == "gelu"
        self._launches = tuple(launches)
        self._chosen: dict[int, Launch] = {}

    def launch_for(self, tokens: int) -> Launch:
        """Return how so many tokens are run."""
        launch = self._chosen.get(tokens)
        if launch is None:
            launch = self._chosen[tokens] = choose(self._launches, tokens)
        return launch

    def route(
        self, router_logits: torch.Tensor, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose each token's experts, in one kernel; see the interface."""
        return route(router_logits, self._top_k, renormalize=renormalize)

    def run_experts(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        scales: ExpertScales | None = None,
    ) -> torch.Tensor:
        """Run each expert on its tokens; see the interface for shapes, and for fp8."""
        tokens = len(hidden)
        if not tokens:
            return torch.empty_like(hidden)
        launch = self.launch_for(tokens)
        routed = Routed(experts.contiguous(), weights.contiguous(), self._first_expert)
        x = hidden.contiguous()
        return run_launch(x, routed, gate_up, down, launch, gelu=self._gelu, scales=scales)


def run_launch(
    hidden: torch.Tensor,
    routed: Routed,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    launch: Launch,
    *,
    gelu: bool,
    scales: ExpertScales | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts that are held, ``[T, hidden]``.

    Args:
        hidden: ``[T, hidden]``, contiguous.
        routed: experts and weights of each token.
        gate_up_weight: ``[E, 2 * inner, hidden]``, contiguous.
        down_weight: ``[E, hidden, inner]``, contiguous.
        launch: how.
        gelu: the activation; else SiLU.
        scales: of weights in fp8.
    """
    of_gate_up, of_down = (None, None) if scales is None else (scales.gate_up, scales.down)
    if isinstance(launch, Few):
        rows = few_gate_up(
            hidden, gate_up_weight, routed, launch.gate_up, gelu=gelu, scale=of_gate_up
        )
        return few_down(rows, down_weight, routed, launch.down, scale=of_down)
    x, product = operand(hidden, of_gate_up)
    tiles = sort_by_expert(routed, len(gate_up_weight), launch.rows)
    top_k = routed.experts.shape[1]
    rows = gate_up(x, gate_up_weight, tiles, top_k, launch.gate_up, gelu=gelu, fp8=product)
    rows, product = operand(rows, of_down)
    parts = down(rows, down_weight, routed.weights, tiles, launch.down, fp8=product)
    return sum_parts(parts, routed, len(down_weight))
