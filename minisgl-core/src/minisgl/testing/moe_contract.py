"""The contract that every MoE backend keeps, as tests to inherit.

A third-party backend proves itself with a subclass in its own tests::

    class TestPlainExperts(MoeBackendContract):
        device, dtype = "cuda", torch.bfloat16

        def create(self, context):
            return PlainExperts(context, PlainSettings())

Every test compares with experts in float64, token by token, by relative norm. Needs pytest.

With ``weights_dtype = torch.float8_e4m3fn`` the same tests run quantized experts: the reference
then quantizes rows and rounds as ``MoeBackend`` says, and computes the rest in float64. An inner
value between two of fp8 may be rounded to either: one token may be off by more than all together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.moe.fp8 import FP8, ExpertScales, quantize_rows, quantize_stack
from minisgl.moe.interface import MoeBackend, MoeContext

_ALL = slice(None)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}
_OF_QUANTIZED = {torch.float32: 1e-3, torch.bfloat16: 1.5e-2, torch.float16: 1e-2}
_OF_ONE_VALUE = 0.5
"""What one inner value of ``n`` may change if it lies on a border of fp8, times ``n ** -0.5``.

It may be rounded to either side, an eighth apart, and one value may well be several times the mean.
"""
_OF_LARGEST = 0.5
"""What the largest value of an inner row may change, times the root of the dtype's epsilon.

If it is rounded to the other side in the backend's dtype, the row's scale moves by as much, and all
values that lie so near to a border of fp8 are rounded to the other side with it.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer: experts, experts a token, elements of a hidden state and of an expert."""

    experts: int
    top_k: int
    hidden: int
    inner: int

    def __str__(self) -> str:
        return f"{self.experts}x{self.top_k}-{self.hidden}-{self.inner}"


@dataclass(frozen=True, slots=True)
class MoeInputs:
    """What a layer with all experts is given, as in the interface."""

    hidden: torch.Tensor
    logits: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    renormalize: bool = True
    scales: ExpertScales | None = None

    def run(self, backend: MoeBackend) -> torch.Tensor:
        """Return what the backend makes of it."""
        with torch.inference_mode():
            return backend.forward(
                self.hidden,
                self.logits,
                self.gate_up,
                self.down,
                renormalize=self.renormalize,
                **self.scales_of(),
            )

    def scales_of(self, part: slice = _ALL) -> dict[str, ExpertScales]:
        """Return the argument for some experts' scales; none unless they are quantized."""
        if self.scales is None:
            return {}
        return {"scales": ExpertScales(self.scales.gate_up[part], self.scales.down[part])}


class MoeBackendContract:
    """Inherit, override ``create`` and run pytest.

    Attributes:
        device, dtype: to test on.
        sizes: layers, odd ones among them.
        num_tokens: of the launches: below, at and above the borders of tiles.
        activations: of the gate.
        weights_dtype: of quantized experts; ``None``: of experts in ``dtype``.
        tolerance: largest relative error of a token, of quantized experts that of all tokens
            together; ``None`` is a value for the dtype.
    """

    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32
    sizes: ClassVar[Sequence[Sizes]] = (
        Sizes(8, 2, 64, 32),
        Sizes(16, 4, 128, 96),
        Sizes(5, 3, 72, 40),
        Sizes(6, 1, 33, 17),
    )
    num_tokens: ClassVar[Sequence[int]] = (1, 3, 17, 130)
    activations: ClassVar[Sequence[str]] = ("silu", "gelu")
    weights_dtype: ClassVar[torch.dtype | None] = None
    tolerance: ClassVar[float | None] = None

    def create(self, context: MoeContext) -> MoeBackend:
        """Return the backend under test."""
        raise NotImplementedError

    # -- the tests

    def test_output(self, size: Sizes, tokens: int) -> None:
        """Tokens routed as a router does on inputs that it was not trained for: nearly evenly."""
        for renormalize in (True, False):
            self._check(size, replace(self.inputs(size, tokens), renormalize=renormalize))

    def test_activations(self, activation: str) -> None:
        """Each activation of the gate."""
        self._check(self.sizes[0], self.inputs(self.sizes[0], 9), activation=activation)

    def test_experts_with_all_tokens_and_with_none(self, size: Sizes, tokens: int) -> None:
        """Weights of experts that nobody chose are not numbers, and touch nothing."""
        inputs = self.inputs(size, tokens)
        inputs.logits[:, -1] += 50
        inputs.logits[:, : size.experts - size.top_k] -= 50
        unused = slice(0, size.experts - size.top_k)
        for weights in (inputs.gate_up[unused], inputs.down[unused]):
            weights.copy_(torch.full_like(weights, math.nan, dtype=torch.float32))
        if inputs.scales is not None:
            inputs.scales.gate_up[unused] = math.nan
            inputs.scales.down[unused] = math.nan
        self._check(size, inputs)

    def test_skewed_routing(self, size: Sizes, tokens: int) -> None:
        """Few experts have most tokens, most have few."""
        inputs = self.inputs(size, tokens)
        inputs.logits.sub_(torch.arange(size.experts, device=self.device))
        self._check(size, inputs)

    def test_of_equal_experts_the_first_are_chosen(self) -> None:
        """Ties go to the lower number: greedy tokens depend on nothing else."""
        size = self.sizes[0]
        inputs = self.inputs(size, 5)
        inputs.logits.zero_()
        inputs.logits[3:, 1:6] = 2.0
        self._check(size, inputs)

    def test_logits_of_any_size(self) -> None:
        """The softmax neither overflows nor loses a token whose logits are far apart."""
        size = self.sizes[0]
        inputs = self.inputs(size, 4)
        inputs.logits[0] = max(-1e30, torch.finfo(self.dtype).min)
        inputs.logits[1] *= 1e4
        inputs.logits[2] += 1e4
        self._check(size, inputs)

    def test_rows_of_wider_tensors(self) -> None:
        """Hidden states and logits that are columns of something wider."""
        size = self.sizes[0]
        inputs = self.inputs(size, 7)
        hidden = torch.cat((inputs.hidden, inputs.hidden), dim=1)[:, : size.hidden]
        logits = torch.cat((inputs.logits, inputs.logits), dim=1)[:, : size.experts]
        self._check(size, replace(inputs, hidden=hidden, logits=logits))

    def test_inputs_stay_as_they_are(self) -> None:
        """Hidden states are the residual's next input, and logits may be looked at."""
        inputs = self.inputs(self.sizes[0], 7)
        before = inputs.hidden.clone(), inputs.logits.clone()
        inputs.run(self.create(self.context(self.sizes[0])))
        assert torch.equal(inputs.hidden, before[0])
        assert torch.equal(inputs.logits, before[1])

    def test_the_same_inputs_have_the_same_output(self, tokens: int) -> None:
        """To the bit: greedy tokens can be had again."""
        inputs = self.inputs(self.sizes[0], tokens)
        backend = self.create(self.context(self.sizes[0]))
        first = inputs.run(backend)
        for _ in range(2):
            assert torch.equal(inputs.run(backend), first)

    def test_experts_that_are_not_held(self, size: Sizes, tokens: int) -> None:
        """Experts of other ranks add nothing, and neither does -1, which padding rows have."""
        inputs = self.inputs(size, tokens)
        held = range(1, size.experts - 1)
        context = replace(self.context(size), held_experts=held)
        backend = self.create(context)
        weights, experts = backend.route(inputs.logits, renormalize=True)
        experts = experts.clone()
        experts[tokens // 2 :] = -1
        part = slice(held.start, held.stop)
        with torch.inference_mode():
            out = backend.run_experts(
                inputs.hidden,
                weights,
                experts,
                inputs.gate_up[part],
                inputs.down[part],
                **inputs.scales_of(part),
            )
        expected = sum_in_float64(inputs, weights.double(), experts, "silu", held)
        self._compare_rows(out, expected, size.inner)

    def test_quantized_rows_of_any_size(self) -> None:
        """Rows of zeros, large and small ones, and one value beside which the others are small."""
        if self.weights_dtype is None:
            pytest.skip("is about quantized experts")
        size = self.sizes[0]
        inputs = self.inputs(size, 6)
        inputs.hidden[0] = 0
        inputs.hidden[1] *= 8
        inputs.hidden[2:4] *= 2**-5
        inputs.hidden[3, 1] = 30
        inputs.gate_up[:, 2] = 0
        inputs.down[:, 3] = 0
        self._check(size, inputs)

    def test_no_tokens(self) -> None:
        """A launch may be empty."""
        size = self.sizes[0]
        out = self.inputs(size, 0).run(self.create(self.context(size)))
        assert out.shape == (0, size.hidden)

    def test_a_recorded_graph_serves_any_routing(self, size: Sizes, tokens: int) -> None:
        """Recorded with one routing, replayed with others: nothing depends on it."""
        backend = self.create(self.context(size))
        if not backend.cuda_graphs or torch.device(self.device).type != "cuda":
            pytest.skip("takes no part in CUDA graphs here")
        static = self.inputs(size, tokens)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            static.run(backend)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = static.run(backend)
        for seed in range(4):
            fresh = self.inputs(size, tokens, seed=seed + 1)
            static.hidden.copy_(fresh.hidden)
            static.logits.copy_(fresh.logits * seed * 4)
            graph.replay()
            self._compare(out, static, "silu")

    # -- what they are made of

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test for every combination of the attributes that it asks for."""
        for name, values in (
            ("size", self.sizes), ("tokens", self.num_tokens), ("activation", self.activations),
        ):  # fmt: skip
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    def context(self, size: Sizes, activation: str = "silu") -> MoeContext:
        """Return what the backend of a layer is created with."""
        return MoeContext(
            device=torch.device(self.device),
            dtype=self.dtype,
            num_experts=size.experts,
            top_k=size.top_k,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            activation=activation,
            max_num_tokens=max(self.num_tokens),
            weights_dtype=self.weights_dtype,
        )

    def inputs(self, size: Sizes, tokens: int, *, seed: int = 0) -> MoeInputs:
        """Return random inputs; the same ones for the same arguments."""
        random = torch.Generator(self.device).manual_seed(1000 * seed + tokens)

        def randn(*shape: int, scale: float) -> torch.Tensor:
            empty = torch.empty(shape, dtype=self.dtype, device=self.device)
            return empty.normal_(std=scale, generator=random)

        inputs = MoeInputs(
            hidden=randn(tokens, size.hidden, scale=1.0),
            logits=randn(tokens, size.experts, scale=1.0),
            gate_up=randn(size.experts, 2 * size.inner, size.hidden, scale=size.hidden**-0.5),
            down=randn(size.experts, size.hidden, size.inner, scale=size.inner**-0.5),
        )
        return inputs if self.weights_dtype is None else quantized(inputs, self.weights_dtype)

    def _check(self, size: Sizes, inputs: MoeInputs, activation: str = "silu") -> None:
        backend = self.create(self.context(size, activation))
        self._compare(inputs.run(backend), inputs, activation)

    def _compare(self, out: torch.Tensor, inputs: MoeInputs, activation: str) -> None:
        assert out.dtype == inputs.hidden.dtype
        expected = experts_in_float64(inputs, self._top_k(inputs), activation)
        self._compare_rows(out, expected, inputs.down.shape[2])

    def _compare_rows(self, out: torch.Tensor, expected: torch.Tensor, inner: int) -> None:
        assert out.shape == expected.shape
        if not len(out):
            return
        norm = expected.norm(dim=1)
        difference = (out.double() - expected).norm(dim=1).nan_to_num(nan=math.inf)
        whole = float(difference.norm() / norm.norm().clamp(min=1e-30))
        difference = torch.where(norm > 0, difference / norm, difference)  # zero is exact
        error, token = difference.max(dim=0)
        if self.weights_dtype is None:
            tolerance = _TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance
        else:
            tolerance = _OF_QUANTIZED[self.dtype] if self.tolerance is None else self.tolerance
            together = tolerance + _OF_ONE_VALUE * (inner * len(out)) ** -0.5
            assert whole < together, f"all tokens together are off by {whole:.2e}"
            tolerance += _OF_ONE_VALUE * inner**-0.5
            tolerance += _OF_LARGEST * torch.finfo(self.dtype).eps ** 0.5
        assert error < tolerance, f"token {int(token)} is off by {float(error):.2e}"

    def _top_k(self, inputs: MoeInputs) -> int:
        shape = inputs.down.shape
        return next(size.top_k for size in self.sizes if (size.experts, size.hidden) == shape[:2])


def quantized(inputs: MoeInputs, weights_dtype: torch.dtype) -> MoeInputs:
    """Return the same with quantized experts."""
    assert weights_dtype == FP8, "the one dtype that there are scales for"
    gate_up, of_gate_up = quantize_stack(inputs.gate_up)
    down, of_down = quantize_stack(inputs.down)
    scales = ExpertScales(of_gate_up, of_down)
    return replace(inputs, gate_up=gate_up, down=down, scales=scales)


def experts_in_float64(inputs: MoeInputs, top_k: int, activation: str) -> torch.Tensor:
    """Return ``[T, hidden]``; routed in float32 as the interface says, then all in float64."""
    probabilities = inputs.logits.float().softmax(dim=-1)
    weights, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :top_k].double(), chosen[:, :top_k]
    if inputs.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return sum_in_float64(inputs, weights, chosen, activation, range(len(inputs.gate_up)))


def sum_in_float64(
    inputs: MoeInputs,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
    held: range,
) -> torch.Tensor:
    """Return the weighted sum ``[T, hidden]`` of each token's experts that are ``held``."""
    hidden = inputs.hidden.double()
    out = torch.zeros_like(hidden)
    for expert in sorted(set(chosen.flatten().tolist()) & set(held)):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        of_gate_up = None if inputs.scales is None else inputs.scales.gate_up[expert]
        of_down = None if inputs.scales is None else inputs.scales.down[expert]
        both = _product(hidden[tokens], inputs.gate_up[expert], of_gate_up)
        # What is quantized is rounded before: nothing else would be quantized to the same.
        dtype = torch.float64 if inputs.scales is None else inputs.hidden.dtype
        gate, up = both.to(dtype).double().chunk(2, dim=-1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        inner = (active.to(dtype).double() * up).to(dtype).double()
        part = _product(inner, inputs.down[expert], of_down)
        out.index_add_(0, tokens, part * weights[tokens, place, None])
    return out


def _product(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``rows @ weight.T`` in float64; with ``scale``, of both sides in fp8."""
    if scale is None:
        return F.linear(rows, weight.double())
    values, of_rows = quantize_rows(rows)
    return (
        F.linear(values.float().double(), weight.float().double())
        * of_rows.double()[:, None]
        * scale.double()
    )
