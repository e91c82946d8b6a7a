"""The head of a decode step: a packed plan into the rows' state, their state into model inputs."""

import torch
import triton
import triton.language as tl

from minisgl.kernel.rows import HAS_ORDER, HEADER_WORDS, PARAM_WORDS, DecodeInputs, RowTensors
from minisgl.kernel.triton.dispatch import dispatched

_BLOCK = 128
_PROGRAMS = 32
"""A plan of 256 page writes keeps two of them busy; one of a whole prompt at page size 1, all."""


def apply_plan(words: torch.Tensor, rows: RowTensors) -> None:
    """Apply the packed plan in ``words``, int32, whose header is read on the device."""
    _apply_plan_kernel[(_PROGRAMS,)](
        words, *rows, rows.page_table.stride(0), len(rows.order),
        HEADER_WORDS, PARAM_WORDS, HAS_ORDER, _PROGRAMS, _BLOCK,
        num_warps=4,
    )  # fmt: skip


def advance_rows(rows: RowTensors, inputs: DecodeInputs, page_size: int) -> None:
    """Fill ``inputs`` for the first rows of the order, and advance their lengths."""
    num_rows = len(inputs.input_ids)
    _advance_rows_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        rows.page_table, rows.lengths, rows.last_token, rows.order, rows.temperature, rows.seed,
        *inputs, rows.page_table.stride(0), num_rows, len(rows.order), page_size, _BLOCK,
        num_warps=4,
    )  # fmt: skip


@dispatched
@triton.jit
def _apply_plan_kernel(
    words,
    page_table,
    lengths,  # noqa: ARG001
    last_token,  # noqa: ARG001
    order,
    temperature,
    top_p,
    min_p,
    top_k,
    seed,
    width: tl.constexpr,
    max_rows: tl.constexpr,
    header: tl.constexpr,
    param_words: tl.constexpr,
    has_order: tl.constexpr,
    programs: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    first = tl.program_id(0) * block
    flags = tl.load(words + 2)
    num_added = tl.load(words + 3)
    num_writes = tl.load(words + 5)
    num_order = tl.load(words + 6)
    writes = words + header + num_added * param_words + tl.load(words + 4)
    start = first
    while start < num_writes:
        at = start + tl.arange(0, block)
        there = at < num_writes
        row = tl.load(writes + at * 3, there, 0).to(tl.int64)
        column = tl.load(writes + at * 3 + 1, there, 0)
        page = tl.load(writes + at * 3 + 2, there, 0)
        tl.store(page_table + row * width + column, page, there)
        start += programs * block
    start = first
    while start < num_added:
        at = start + tl.arange(0, block)
        there = at < num_added
        params = words + header + at * param_words
        row = tl.load(params, there, 0)
        value = tl.load(params + 2, there, 0).to(tl.float32, bitcast=True)
        tl.store(temperature + row, value, there)
        tl.store(top_k + row, tl.load(params + 3, there, 0).to(tl.int64), there)
        tl.store(top_p + row, tl.load(params + 4, there, 0).to(tl.float32, bitcast=True), there)
        tl.store(min_p + row, tl.load(params + 5, there, 0).to(tl.float32, bitcast=True), there)
        low = tl.load(params + 6, there, 0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(params + 7, there, 0).to(tl.int64)
        tl.store(seed + row, (high << 32) | low, there)
        start += programs * block
    if flags & has_order != 0:
        start = first
        while start < max_rows:
            at = start + tl.arange(0, block)
            row = tl.load(writes + num_writes * 3 + at, at < num_order, max_rows)
            tl.store(order + at, row.to(tl.int64), at < max_rows)
            start += programs * block


@dispatched
@triton.jit(do_not_specialize=["num_rows"])
def _advance_rows_kernel(
    page_table,
    lengths,
    last_token,
    order,
    temperature,
    seed,
    input_ids,
    positions,
    slots,
    kv_lens,
    temperatures,
    seeds,
    places,
    width: tl.constexpr,
    num_rows,
    padding_row: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < num_rows
    row = tl.load(order + at, there, padding_row)
    real = row != padding_row
    position = tl.load(lengths + row)
    page = tl.load(page_table + row * width + position // page_size).to(tl.int64)
    tl.store(input_ids + at, tl.load(last_token + row), there)
    tl.store(positions + at, position, there)
    slot = tl.where(real, page * page_size + position % page_size, -1)
    tl.store(slots + at, slot, there)
    tl.store(kv_lens + at, (position + 1).to(tl.int32), there)
    tl.store(temperatures + at, tl.load(temperature + row), there)
    tl.store(seeds + at, tl.load(seed + row), there)
    tl.store(places + at, position + 1, there)
    tl.store(lengths + row, position + 1, there & real)
