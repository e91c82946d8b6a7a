"""Rows in fp8 by the kernel: the values and scales of the definition, to the bit."""

import pytest
import torch

pytest.importorskip("triton")

from minisgl.moe import quantize_rows
from minisgl_moe_triton.kernels import quantize as kernel
from minisgl_moe_triton.kernels.quantize import quantize

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_moe.py runs this on a card", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 33, 768, 2048])
@pytest.mark.parametrize("at_once", [8192, 64])
def test_rows_are_those_of_the_definition(
    dtype: torch.dtype, width: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros, rows of all sizes, values that round up to a power of two, and subnormal ones."""
    monkeypatch.setattr(kernel, "_BLOCK", at_once)
    random = torch.Generator().manual_seed(width)
    rows = torch.randn(9, width, generator=random)
    rows *= torch.exp(2 * torch.randn(9, width, generator=random))
    rows[1:3] *= torch.tensor([[1e-3], [30.0]])
    rows[0] = 0
    rows = rows.to(dtype)
    values, scales = quantize(rows)
    expected, of_expected = quantize_rows(rows)
    assert torch.equal(scales, of_expected)
    # Which differ in the sign of zeros in the interpreter.
    assert torch.equal(values.float(), expected.float())
    if width > 100:
        subnormal = expected.float().abs()
        assert ((subnormal > 0) & (subnormal < 2**-6)).any()
