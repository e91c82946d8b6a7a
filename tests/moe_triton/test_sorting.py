"""Assignments sorted by expert, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from support.moe_sorting import SORTS, check_sort


@pytest.mark.parametrize("sort", SORTS, ids=lambda sort: "-".join(map(str, sort[:2])))
def test_rows_and_tiles(sort: tuple[int, int, range, int, int, float]) -> None:
    check_sort("cpu", *sort)
