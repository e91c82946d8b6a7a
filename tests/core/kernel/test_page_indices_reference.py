"""The torch reference of ``page_indices`` against lists made row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.kernel import reference


@given(
    page_size=st.sampled_from([1, 2, 16]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
def test_pages_of_all_rows_one_after_the_other(page_size, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    width = -(-60 // page_size)
    table = torch.randint(1, 1000, (8, width), generator=generator, dtype=torch.int32)
    rows = torch.randperm(8, generator=generator)[: len(lengths)]
    pages = [-(-length // page_size) for length in lengths]
    indptr = torch.full((len(lengths) + 1,), -7, dtype=torch.int32)
    indices = torch.full((sum(pages) + 5,), -7, dtype=torch.int32)
    last = torch.full((len(lengths),), -7, dtype=torch.int32)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    reference.page_indices(table, rows, kv_lens, page_size, indptr, indices, last)
    expected = [table[row, :n] for row, n in zip(rows.tolist(), pages, strict=True)]
    assert indices.tolist() == [*torch.cat(expected).tolist(), *[-7] * 5]
    assert indptr.tolist() == [0, *torch.tensor(pages).cumsum(0).tolist()]
    assert last.tolist() == [(length - 1) % page_size + 1 for length in lengths]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_that_fills_its_table(page_size):
    table = torch.arange(1, 5, dtype=torch.int32).unsqueeze(0)
    indptr, last = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    indices = torch.zeros(4, dtype=torch.int32)
    kv_lens = torch.tensor([4 * page_size], dtype=torch.int32)
    row = torch.zeros(1, dtype=torch.int64)
    reference.page_indices(table, row, kv_lens, page_size, indptr, indices, last)
    assert (indices.tolist(), last.item()) == ([1, 2, 3, 4], page_size)
