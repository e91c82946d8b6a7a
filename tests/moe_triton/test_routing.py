"""Experts of tokens, and assignments sorted by expert, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from support.moe_routing import ROUTERS, check_route
from support.moe_sorting import SORTS, check_sort


@pytest.mark.parametrize(("dtype", "experts", "top_k"), ROUTERS)
def test_the_likeliest_experts(dtype: torch.dtype, experts: int, top_k: int) -> None:
    check_route("cpu", dtype, experts, top_k)


@pytest.mark.parametrize("sort", SORTS, ids=lambda sort: "-".join(map(str, sort[:2])))
def test_rows_and_tiles(sort: tuple[int, int, range, int, int, float]) -> None:
    check_sort("cpu", *sort)
