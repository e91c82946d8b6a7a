"""What an MoE backend must offer, and what it is given."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minisgl.kernel.jit import JitLoader
from minisgl.moe.fp8 import ExpertScales


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeContext:
    """What a backend is created with.

    Attributes:
        device, dtype: of hidden states, and of weights unless ``weights_dtype`` says another one.
        num_experts: routed experts of a layer, on all ranks together.
        top_k: experts a token.
        hidden_size: elements of a hidden state.
        intermediate_size: inner elements of one expert on this rank.
        activation: ``silu`` or ``gelu``: of the gate.
        max_num_tokens: most tokens of one launch.
        held_experts: numbers of the experts whose weights this rank holds; ``None``: of all.
        weights_dtype: of the experts' weights, if they are quantized: ``float8_e4m3fn``, which only
            a backend gets whose record declares it (``MoeBackendRecord.weights_dtypes``).
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
    held_experts: range | None = None
    weights_dtype: torch.dtype | None = None
    jit: JitLoader = field(default_factory=JitLoader)

    @property
    def local_experts(self) -> range:
        """The experts of this rank: weight ``i`` of a stack is that of ``local_experts[i]``."""
        return range(self.num_experts) if self.held_experts is None else self.held_experts


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
    """Runs the routed experts of one layer that this rank holds.

    ``num_local`` is ``len(context.local_experts)``: fewer than ``num_experts`` under expert
    parallelism. Numbers of experts are always those of the whole layer.

    **Quantized experts** (``context.weights_dtype``) come with ``scales``, which is not passed
    otherwise: a backend that declares no such dtype need not have the argument. Both products then
    take fp8 operands, by ``quantize_rows``:

    1. Each token's hidden state is quantized; its products with the gate's and the up's channels
       are added up in float32, and multiplied by the token's and the channel's scale.
    2. These are rounded to ``dtype``, and the activation is computed as for weights in ``dtype``.
    3. The inner row of each pair of token and expert is quantized again, and its products with the
       channels of down are added up and multiplied likewise.
    4. Times the router's weight, they are added up over the token's experts.
    """

    cuda_graphs: bool = False
    """``forward`` may be recorded: no shape depends on the routing, and nothing synchronises."""

    def __init__(self, context: MoeContext) -> None:
        self._top_k = context.top_k

    def forward(
        self,
        hidden: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        renormalize: bool,
        scales: ExpertScales | None = None,
    ) -> torch.Tensor:
        """Return ``route`` and ``run_experts`` behind one another, ``[T, hidden_size]``.

        A backend may override this to do both in fewer kernels.

        Args:
            hidden: ``[T, hidden_size]``.
            router_logits: ``[T, num_experts]``.
            gate_up: see ``run_experts``.
            down: see there.
            renormalize: see ``route``.
            scales: of quantized experts.
        """
        weights, experts = self.route(router_logits, renormalize=renormalize)
        if scales is None:  # which a backend without quantized experts need not know
            return self.run_experts(hidden, weights, experts, gate_up, down)
        return self.run_experts(hidden, weights, experts, gate_up, down, scales=scales)

    def route(
        self, router_logits: torch.Tensor, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose each token's experts: weights, float32, and numbers, int32; ``[T, top_k]`` both.

        Args:
            router_logits: ``[T, num_experts]``; the softmax over all experts is taken in float32,
                and of equally likely experts those of lower numbers are chosen.
            renormalize: divide the chosen experts' weights by their sum.
        """
        # Not topk, which leaves open which of two equals it takes: bfloat16 logits often are equal.
        order = router_logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        weights, experts = (part[:, : self._top_k] for part in order)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts.to(torch.int32)

    @abstractmethod
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
        """Return the weighted sum of each token's experts on this rank, ``[T, hidden_size]``.

        Experts of other ranks add nothing: with several ranks the sum is partial, and whoever calls
        this adds up the ranks' sums.

        Args:
            hidden: ``[T, hidden_size]``; ``T`` may be 0 behind an ``ExpertExchange``.
            weights: float32, ``[T, top_k]``.
            experts: int32, ``[T, top_k]``; those not in ``local_experts``, and -1, are skipped.
            gate_up: ``[num_local, 2 * intermediate_size, hidden_size]``, gate rows first; of
                ``dtype``, or of ``weights_dtype``.
            down: ``[num_local, hidden_size, intermediate_size]``, the same.
            scales: of experts in ``weights_dtype``.
        """
