"""The CPU's fast linear operation against the reference."""

import pytest
import torch

from minisgl.kernel import onednn, reference


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 32, 33])
@pytest.mark.parametrize("by_columns", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_equals_the_reference_for_any_rows_layout_and_bias(
    num_rows: int,
    by_columns: bool,
    with_bias: bool,
) -> None:
    if (reason := onednn.missing()) is not None:
        pytest.skip(reason)
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, 40), torch.randn(56, 40)
    if by_columns:
        weight = weight.t().contiguous().t()
    bias = torch.randn(56) if with_bias else None
    with torch.inference_mode():
        out = onednn.linear(x, weight, bias)
    torch.testing.assert_close(out, reference.linear(x, weight, bias))
    strided = torch.randn(num_rows, 2, 40)[:, 1]
    torch.testing.assert_close(
        onednn.linear(strided, weight, bias), reference.linear(strided, weight, bias)
    )
