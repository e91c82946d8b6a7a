"""Matrix products of few rows on a CPU, through oneDNN.

torch sends float32 products to MKL, whose kernels for 2 to 32 rows leave much of a core idle;
the oneDNN that torch carries along for its compiler does not. The operator is torch's own but not
public (aten/src/ATen/native/mkldnn/Linear.cpp in pytorch/pytorch; there since 2.0), so it is tried
once at start-up, and the reference stays if it is missing or disagrees.
"""

import torch
import torch.nn.functional as F  # noqa: N812

_FEWEST_ROWS, _MOST_ROWS = 2, 32
"""MKL does one row, a matrix-vector product, at the memory's speed; above, both are equal."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[T, in]`` and ``weight`` ``[out, in]``, float32."""
    if _FEWEST_ROWS <= x.shape[0] <= _MOST_ROWS:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
        return out
    return F.linear(x, weight, bias)


def missing() -> str | None:
    """Return why ``linear`` cannot be used here, or ``None`` if it can."""
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        out = linear(x, weight.t().contiguous().t(), torch.ones(4))
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"this build of torch has no oneDNN linear operator ({error})"
    if not torch.allclose(out, F.linear(x, weight, torch.ones(4))):
        return "this build's oneDNN linear operator disagrees with torch's own"
    return None
