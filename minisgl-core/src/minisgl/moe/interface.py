"""What an MoE backend must offer, and what it is given."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from minisgl.kernel.jit import JitLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeContext:
    """What a backend is created with.

    Attributes:
        device, dtype: of hidden states and weights.
        num_experts: routed experts of a layer.
        top_k: experts a token.
        hidden_size: elements of a hidden state.
        intermediate_size: inner elements of one expert on this rank.
        activation: ``silu`` or ``gelu``: of the gate.
        max_num_tokens: most tokens of one launch.
        jit: loads a backend's own CUDA sources.
    """

    device: torch.device
    dtype: torch.dtype
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    max_num_tokens: int
    jit: JitLoader = field(default_factory=JitLoader)


class MoeBackend(ABC):
    """Runs the routed experts of one layer."""

    cuda_graphs: bool = False
    """``forward`` may be recorded: no shape depends on the routing, and nothing synchronises."""

    @abstractmethod
    def forward(
        self,
        hidden: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        renormalize: bool,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, ``[T, hidden_size]``.

        On a tensor-parallel rank the sum is partial; the layer reduces it.

        Args:
            hidden: ``[T, hidden_size]``.
            router_logits: ``[T, num_experts]``; the softmax over all experts is taken in float32.
            gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``, gate rows first.
            down: ``[num_experts, hidden_size, intermediate_size]``.
            renormalize: divide the chosen experts' weights by their sum.
        """
