"""The reference MoE backend against experts written out token by token in float64."""

import pytest
import torch

from minisgl.moe.interface import MoeContext
from minisgl.moe.torch_backend import TorchMoeBackend


def make_backend(
    experts: int, top_k: int, hidden: int, inner: int, held: range | None = None
) -> TorchMoeBackend:
    context = MoeContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
        activation="silu",
        max_num_tokens=64,
        held_experts=held,
    )
    return TorchMoeBackend(context)


@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("skewed", [True, False])
def test_output_is_the_weighted_sum_of_the_chosen_experts(
    num_tokens: int,
    renormalize: bool,
    skewed: bool,
) -> None:
    experts, top_k, hidden, inner = 6, 2, 10, 7
    torch.manual_seed(0)
    x, logits = torch.randn(num_tokens, hidden), torch.randn(num_tokens, experts)
    if skewed:  # one expert has every token, another none
        logits[:, 3] += 50
        logits[:, 5] -= 50
    gate_up = torch.randn(experts, 2 * inner, hidden)
    down = torch.randn(experts, hidden, inner)
    backend = make_backend(experts, top_k, hidden, inner)
    out = backend.forward(x, logits, gate_up, down, renormalize=renormalize)
    for token in range(num_tokens):
        weights, chosen = logits[token].double().softmax(-1).topk(top_k)
        if renormalize:
            weights = weights / weights.sum()
        expected = torch.zeros(hidden, dtype=torch.float64)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected += weight * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(out[token].double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_the_sums_of_ranks_that_hold_some_experts_add_up_to_the_whole(num_tokens: int) -> None:
    """Catches: experts taken by their place on a rank, negative ones that count from the end."""
    experts, top_k, hidden, inner = 6, 3, 10, 7
    torch.manual_seed(1)
    x, logits = torch.randn(num_tokens, hidden), torch.randn(num_tokens, experts)
    gate_up = torch.randn(experts, 2 * inner, hidden)
    down = torch.randn(experts, hidden, inner)
    whole = make_backend(experts, top_k, hidden, inner)
    expected = whole.forward(x, logits, gate_up, down, renormalize=True)
    total = torch.zeros_like(x)
    for held in (range(4), range(4, 6)):
        part = make_backend(experts, top_k, hidden, inner, held)
        taken = slice(held.start, held.stop)
        total += part.forward(x, logits, gate_up[taken], down[taken], renormalize=True)
    torch.testing.assert_close(total, expected)


def test_tokens_without_an_expert_here_get_nothing() -> None:
    backend = make_backend(6, 2, 4, 3, range(2, 4))
    nobody = torch.tensor([[-1, -1], [0, 5]], dtype=torch.int32)
    stacks = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    out = backend.run_experts(torch.randn(2, 4), torch.ones(2, 2), nobody, *stacks)
    assert not out.any()


def test_a_backend_without_quantized_experts_needs_no_scales() -> None:
    """Backends written before there were any run as they did."""

    class Older(TorchMoeBackend):
        def run_experts(self, hidden, weights, experts, gate_up, down):  # type: ignore[override]
            return super().run_experts(hidden, weights, experts, gate_up, down)

    context = MoeContext(
        device=torch.device("cpu"), dtype=torch.float32, num_experts=4, top_k=2, hidden_size=8,
        intermediate_size=6, activation="silu", max_num_tokens=4,
    )  # fmt: skip
    inputs = torch.randn(3, 8), torch.randn(3, 4), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    expected = TorchMoeBackend(context).forward(*inputs, renormalize=True)
    assert torch.equal(Older(context).forward(*inputs, renormalize=True), expected)
