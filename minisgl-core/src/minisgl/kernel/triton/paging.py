"""The index lists of paged kernels, from the page table: one launch, no synchronisation.

The grid depends on the number of rows and on the table's width alone, so a recorded launch serves
any lengths. Compiled per page size.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, wait_for_inputs

_BLOCK, _NUM_WARPS = 1024, 4
"""Pages that a program copies, and rows whose pages it counts at a time."""


def page_indices(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_lens: torch.Tensor,
) -> None:
    """Flatten the pages of rows; see ``PageIndices``."""
    assert rows.is_contiguous()
    assert kv_lens.is_contiguous()
    width = page_table.shape[1]
    _page_indices_kernel[(rows.shape[0], -(-width // _BLOCK))](
        page_table, rows, kv_lens, indptr, indices, last_page_lens, page_table.stride(0),
        page_size, _BLOCK, num_warps=_NUM_WARPS, launch_pdl=OVERLAP,
    )  # fmt: skip


@dispatched
@triton.jit(
    do_not_specialize=[
        "table_ptr", "rows_ptr", "kv_lens_ptr", "indptr_ptr", "indices_ptr", "last_lens_ptr",
        "table_stride",
    ]
)  # fmt: skip
def _page_indices_kernel(
    table_ptr, rows_ptr, kv_lens_ptr, indptr_ptr, indices_ptr, last_lens_ptr, table_stride,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's ``BLOCK`` columns; each program adds up the rows before its own."""
    row, part = tl.program_id(0), tl.program_id(1)
    wait_for_inputs()
    length = tl.load(kv_lens_ptr + row)
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if part * BLOCK < pages:
        lanes = tl.arange(0, BLOCK)
        counts = tl.zeros((BLOCK,), dtype=tl.int32)
        start = row * 0
        while start < row:
            other = start + lanes
            lengths = tl.load(kv_lens_ptr + other, mask=other < row, other=0)
            counts += (lengths + PAGE_SIZE - 1) // PAGE_SIZE
            start += BLOCK
        before = tl.sum(counts, axis=0)
        table_row = tl.load(rows_ptr + row).to(tl.int64)
        columns = part * BLOCK + lanes
        mask = columns < pages
        found = tl.load(table_ptr + table_row * table_stride + columns, mask=mask)
        tl.store(indices_ptr + before + columns, found, mask=mask)
        if part == 0:
            tl.store(indptr_ptr + row + 1, before + pages)
            tl.store(last_lens_ptr + row, length - (pages - 1) * PAGE_SIZE)
            if row == 0:
                tl.store(indptr_ptr, 0)
