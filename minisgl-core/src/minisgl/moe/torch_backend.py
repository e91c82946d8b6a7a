"""Routed experts in plain torch: a loop over the experts that have tokens; the reference."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.moe.interface import MoeBackend, MoeContext


class TorchMoeBackend(MoeBackend):
    """The reference backend, created from a ``MoeContext``."""

    def __init__(self, context: MoeContext) -> None:
        self._top_k = context.top_k
        self._act = _ACTIVATIONS[context.activation]

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
        # Not topk, which leaves open which of two equals it takes: bfloat16 logits often are equal.
        order = router_logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        weights, chosen = (part[:, : self._top_k] for part in order)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        out = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden[tokens], gate_up[expert]).chunk(2, dim=-1)
            part = F.linear(self._act(gate) * up, down[expert])
            out.index_add_(0, tokens, part * weights[tokens, place].unsqueeze(-1))
        return out


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": _gelu_tanh,
}
