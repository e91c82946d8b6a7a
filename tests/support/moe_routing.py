"""Checks of the router of the backend ``triton`` against a stable sort of probabilities."""

import torch

from minisgl_moe_triton.kernels.routing import route


def check_route(device: str, dtype: torch.dtype, experts: int, top_k: int) -> None:
    """Route logits with ties, zeros of both signs, large ones and -inf, and random ones."""
    random = torch.Generator().manual_seed(experts + top_k)
    logits = torch.randn(40, experts, generator=random)
    logits[0] = 0.0
    logits[1] = torch.where(torch.arange(experts) % 2 == 0, -0.0, 0.0)
    logits[2] = logits[2].round()
    logits[3] = -logits[2].abs()
    logits[4, ::3] = float("-inf")
    logits[5] *= 30
    logits[6] = logits[6].sign()
    logits = logits.to(dtype).to(device)
    for renormalize in (False, True):
        weights, chosen = route(logits, top_k, renormalize=renormalize)
        probabilities = logits.float().cpu().softmax(dim=-1)
        expected, order = logits.float().cpu().sort(dim=-1, descending=True, stable=True)
        expected = probabilities.gather(1, order[:, :top_k])
        if renormalize:
            expected /= expected.sum(dim=-1, keepdim=True)
        assert chosen.dtype == torch.int32
        assert torch.equal(chosen.long().cpu(), order[:, :top_k])
        torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-7)


ROUTERS = [
    (dtype, experts, top_k)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for experts, top_k in ((128, 8), (8, 2), (60, 4), (5, 5), (300, 1))
]
"""Arguments of ``check_route`` behind the device."""
