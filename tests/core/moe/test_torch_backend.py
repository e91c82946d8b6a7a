"""The reference MoE backend against experts written out token by token in float64."""

import pytest
import torch

from minisgl.moe.interface import MoeContext
from minisgl.moe.torch_backend import TorchMoeBackend


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
    backend = TorchMoeBackend(
        MoeContext(
            device=torch.device("cpu"),
            dtype=torch.float32,
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=inner,
            activation="silu",
            max_num_tokens=64,
        )
    )
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
