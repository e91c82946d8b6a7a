"""What an MoE backend must offer, and what it is given."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What ``minisgl tune moe`` asks of a backend that can be tuned.

    Attributes:
        tokens: numbers of tokens to tune for; ``None`` leaves them to the backend.
        folder: where the result is written; ``None`` for where the backend looks for it.
        time_limit_s: end the search then, with the best that was found; ``None`` for no limit.
        progress: show a progress bar.
    """

    tokens: tuple[int, ...] | None = None
    folder: Path | None = None
    time_limit_s: float | None = None
    progress: bool = True


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
            router_logits: ``[T, num_experts]``; the softmax over all experts is taken in float32,
                and of equally likely experts those of lower numbers are chosen.
            gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``, gate rows first.
            down: ``[num_experts, hidden_size, intermediate_size]``.
            renormalize: divide the chosen experts' weights by their sum.
        """
