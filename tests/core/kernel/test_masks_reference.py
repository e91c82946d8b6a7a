"""The torch reference of ``mask_tokens`` against a loop over rows and tokens."""

import pytest
import torch

from minisgl.kernel import OpTable
from support.op_checks import DTYPES, Checks, run_eagerly


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 31, 1), (3, 32, 2), (5, 263, 0), (7, 70, 7)])
def test_mask_tokens(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    Checks(OpTable(), "cpu", run_eagerly).mask_tokens(dtype, *size)


def test_masks_that_do_not_fit_are_refused() -> None:
    Checks(OpTable(), "cpu").refuses_masks()
