"""Routed experts at the shapes of a model: inputs, and what a layer reads and computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

from minisgl.benchmark.published import CONFIGS, write_config
from minisgl.benchmark.timing import Call, num_copies
from minisgl.kernel.jit import JitLoader
from minisgl.models.config import ModelConfig
from minisgl.models.opening import open_checkpoint
from minisgl.moe.fp8 import ExpertScales, quantize_stack
from minisgl.moe.interface import MoeBackend, MoeContext
from minisgl.plugins.host import PluginHost
from minisgl.plugins.lazy import load_object

MOE_TOKENS: Final = (1, 16, 64, 256, 4096)
"""Of the launches, unless others are named."""

_ROUTINGS: Final = 4
"""Launches of one case, each with hidden states of its own, and so with other experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Sizes of a layer's routed experts; see ``MoeContext``."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    renormalize: bool

    def context(
        self,
        device: torch.device,
        dtype: torch.dtype,
        most_tokens: int,
        weights_dtype: torch.dtype | None = None,
    ) -> MoeContext:
        """Return what a backend is created with."""
        return MoeContext(
            device=device,
            dtype=dtype,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            activation=self.activation,
            max_num_tokens=most_tokens,
            weights_dtype=weights_dtype,
            jit=JitLoader(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeCase:
    """A layer's experts for some tokens, whose router knows nothing about them.

    Attributes:
        tokens: of the launch.
        num_bytes: of the weights of all experts that are chosen, read once; the mean of the calls.
        flops: of one call.
        inputs: of each call: hidden states, logits, and both stacks.
        scales: of each call, if the experts are quantized.
    """

    tokens: int
    num_bytes: int
    flops: int
    renormalize: bool
    inputs: tuple[tuple[torch.Tensor, ...], ...]
    scales: tuple[ExpertScales, ...] = ()

    def calls(self, backend: MoeBackend) -> list[Call]:
        """Return calls that route differently, over weights much larger than a cache together."""
        run = partial(backend.forward, renormalize=self.renormalize)
        if not self.scales:
            return [partial(run, *inputs) for inputs in self.inputs]
        pairs = zip(self.inputs, self.scales, strict=True)
        return [partial(run, *inputs, scales=scales) for inputs, scales in pairs]


def moe_shape(reference: str, host: PluginHost) -> MoeShape | None:
    """Return the experts of a published model or of a folder's ``config.json``; ``None``: dense.

    A model that no plugin offers counts as dense: it runs by transformers' own code.
    """
    with TemporaryDirectory() as folder:
        path = Path(reference)
        if reference in CONFIGS or not (path / "config.json").is_file():
            path = write_config(reference, Path(folder) / "model").parent
        checkpoint = open_checkpoint(path, "dummy")
    if not any(host.models.named(name) for name in checkpoint.architectures):
        return None
    record = host.model_for(checkpoint.architectures)
    config = load_object(record.config_reader)(checkpoint.hf_config)
    if not isinstance(config, ModelConfig) or config.moe is None:
        return None
    return MoeShape(
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe.intermediate_size,
        activation=config.activation,
        renormalize=config.moe.renormalize,
    )


def moe_cases(
    shape: MoeShape,
    tokens: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
) -> Iterator[MoeCase]:
    """Yield a case for each number of tokens, all with the same weights.

    Args:
        shape: of the layer.
        tokens: of the launches.
        device: of everything.
        dtype: of hidden states.
        weights_dtype: of quantized experts; ``None``: of experts in ``dtype``.
    """
    randn = partial(torch.randn, dtype=dtype, device=device)
    experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    bytes_of_one = 3 * hidden * inner * (weights_dtype or dtype).itemsize
    if weights_dtype is not None:
        bytes_of_one += (2 * inner + hidden) * torch.float32.itemsize
    copies = num_copies(experts * bytes_of_one, device, most=_ROUTINGS)
    weights = [
        (
            torch.empty(experts, 2 * inner, hidden, dtype=dtype, device=device).normal_(std=0.02),
            torch.empty(experts, hidden, inner, dtype=dtype, device=device).normal_(std=0.02),
        )
        for _ in range(copies)
    ]
    scales = []
    for number in range(copies) if weights_dtype is not None else ():
        (gate_up, of_gate_up), (down, of_down) = map(quantize_stack, weights[number])
        weights[number] = gate_up, down
        scales.append(ExpertScales(of_gate_up, of_down))
    for num in tokens:
        inputs, active = [], 0
        for number in range(_ROUTINGS):
            # A router of random weights makes independent normal logits of random tokens.
            logits = randn(num, experts)
            active += len(logits.topk(shape.top_k, dim=-1).indices.unique())  # type: ignore[no-untyped-call]
            inputs.append((randn(num, hidden), logits, *weights[number % copies]))
        yield MoeCase(
            tokens=num,
            num_bytes=active * bytes_of_one // _ROUTINGS,
            flops=6 * num * shape.top_k * hidden * inner,
            renormalize=shape.renormalize,
            inputs=tuple(inputs),
            scales=tuple(scales[number % copies] for number in range(_ROUTINGS)) if scales else (),
        )
