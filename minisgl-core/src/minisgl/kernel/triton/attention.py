"""Paged attention of decode rows, in shares along their tokens.

A program takes one KV head of one row, with all of its query heads at once, and a share of the
row's tokens (split-KV: Dao et al., 2023, Flash-Decoding); what the shares found is merged by a
second kernel. It looks pages up itself: nothing is planned on the host, and the lengths of rows are
read on the device.

Measured on an H200 that reads 4.45 TB/s (``benchmarks/results/attention-h200.json``), K and V read:
256 rows of 450 to 1350 tokens with 16/8 heads of 128 4.34 TB/s at page size 16 and 4.37 at 64, 64
such rows 3.82, one row of 32,768 tokens 3.18.

Compiled per dtype, heads, head dim, page size, window and cap, never per number of rows or tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.attention_step import LOG2_E, PagedRows, Scores, Tile, attend_step
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs

_MOST_SPLITS = 32
_FEW_ROWS, _WHOLE_ROWS, _MANY_ROWS = 0.42, 1.65, 3.2
"""Turns of all programs: see ``choose_cut``."""
_ORDERED_ROWS = 16
_LEAST_ROWS = 16
"""Of a tensor core's operand: fewer query heads are padded."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How decode rows are shared out.

    Attributes:
        splits: shares of each row's tokens.
        wide: programs take more keys at a time, and fewer run at once.
    """

    splits: int
    wide: bool = False


def paged_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    paged: PagedRows,
    scores: Scores,
    cut: Cut,
) -> torch.Tensor:
    """Attend with one query a row.

    Args:
        q: ``[R, q_heads, d]``, any stride of a row.
        k_pool: keys of a layer, ``[slots, kv_heads, d]``, contiguous.
        v_pool: values, the same.
        paged: the rows.
        scores: of the layer.
        cut: how the rows' tokens are shared out; see ``choose_cut``.

    Returns:
        ``[R, q_heads, d]``, contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if cut.splits == 1:
        launch_decode(q, k_pool, v_pool, paged, scores, Shares(out, out, 1), wide=cut.wide)
        return out
    shares = Shares.allocate(q, cut.splits)
    launch_decode(q, k_pool, v_pool, paged, scores, shares, wide=cut.wide)
    launch_merge(shares, out)
    return out


@dataclass(frozen=True, slots=True)
class Shares:
    """What attention to shares of the rows' tokens has found, to be merged.

    Attributes:
        partial: float32 ``[R, q_heads, n, d]``: of each share, its softmax-weighted values; with
            one share in all, the output itself.
        sums: float32 ``[R, q_heads, n]``: of each, the logarithm to base 2 of its sum of weights.
        own: the last so many shares are of a row's own tokens; those before, of a shared prefix.
        starts: int32 ``[R]``: tokens of a row that it shares; ``None``: no row does.
    """

    partial: torch.Tensor
    sums: torch.Tensor
    own: int
    starts: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, q: torch.Tensor, own: int, shared: int = 0, starts: torch.Tensor | None = None
    ) -> "Shares":
        """Return memory for the shares of queries ``[R, q_heads, d]``."""
        shape = (*q.shape[:2], shared + own)
        partial = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
        return cls(partial, torch.empty(shape, dtype=torch.float32, device=q.device), own, starts)

    @property
    def shared(self) -> int:
        """Shares of a prefix."""
        return 0 if self.starts is None else self.sums.shape[2] - self.own


def launch_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    paged: PagedRows,
    scores: Scores,
    shares: Shares,
    *,
    wide: bool = False,
) -> None:
    """Fill the shares of the rows' own tokens; see ``paged_decode`` for shapes."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    group = num_q_heads // num_kv_heads
    tile = _decode_tile(q.dtype, head_dim, wide=wide)
    _decode_kernel[(num_kv_heads, num_rows, shares.own)](
        q, k_pool, v_pool, paged.page_table, paged.rows, paged.kv_lens,
        paged.kv_lens if shares.starts is None else shares.starts,
        paged.kv_lens if paged.order is None else paged.order, shares.partial, shares.sums,
        scores.scale * LOG2_E, *factors(q.stride(0)), q.stride(1), paged.page_table.stride(0),
        num_kv_heads, group, max(_LEAST_ROWS, triton.next_power_of_2(group)),
        head_dim, triton.next_power_of_2(head_dim), paged.page_size, tile.keys,
        scores.window, scores.cap, shares.own + shares.shared > 1, shares.shared,
        paged.order is not None,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=OVERLAP,
    )  # fmt: skip


def launch_merge(shares: Shares, out: torch.Tensor) -> None:
    """Merge the shares into ``out``, ``[R, q_heads, d]``, contiguous."""
    num_rows, num_q_heads, head_dim = out.shape
    num_shares = shares.shared + shares.own
    block = _MOST_SPLITS if num_shares <= _MOST_SPLITS else triton.next_power_of_2(num_shares)
    _merge_kernel[(num_q_heads, num_rows)](
        shares.partial, shares.sums, shares.sums if shares.starts is None else shares.starts, out,
        num_shares, num_q_heads, head_dim, triton.next_power_of_2(head_dim), block, shares.shared,
        num_warps=4, launch_pdl=OVERLAP,
    )  # fmt: skip


def longest_first(kv_lens: torch.Tensor, order: torch.Tensor) -> None:
    """Write the order of rows by their tokens, the longest first: the last programs end together.

    Args:
        kv_lens: int32 ``[R]``.
        order: int32 ``[R]``, written.
    """
    num_rows = kv_lens.shape[0]
    _order_kernel[(triton.cdiv(num_rows, _ORDERED_ROWS),)](
        kv_lens, order, num_rows, _ORDERED_ROWS, max(16, triton.next_power_of_2(num_rows)),
        num_warps=4, launch_pdl=OVERLAP,
    )  # fmt: skip


def choose_cut(num_rows: int, num_kv_heads: int, num_multiprocessors: int) -> Cut:
    """Return how decode rows are cut, by how often programs of whole rows would fill the device.

    Measured on an H200 for rows of 200 to 1,800 tokens, 2 to 256 of them, three kinds of heads:
    whole rows, the longest first, win as soon as there are enough to even out; below, shares of
    rows do that. Shares of equal rows should not begin another turn of all programs for a few.
    """
    programs, at_once = num_rows * num_kv_heads, 2 * num_multiprocessors
    turns = programs / at_once
    if turns >= _WHOLE_ROWS:
        return Cut(1, wide=turns < _MANY_ROWS)
    if turns > 1:
        return Cut(2)
    if turns > _FEW_ROWS:
        return Cut(6)
    return Cut(min(_MOST_SPLITS, 2 * at_once // programs))


def _decode_tile(dtype: torch.dtype, head_dim: int, *, wide: bool) -> Tile:
    if dtype == torch.float32 or head_dim > 128:
        return Tile(1, 32, 4, 3)
    return Tile(1, 128, 4, 2) if wide else Tile(1, 64, 4, 3)


@dispatched
@triton.jit(do_not_specialize=["q_stride", "table_stride"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, lens_ptr, starts_ptr, order_ptr, out_ptr, sums_ptr,
    scale,
    q_stride, Q_FACTOR: tl.constexpr, HEAD_STRIDE: tl.constexpr, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr, SHARED_SPLITS: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Attend to a share of a row's tokens; with ``SHARED_SPLITS``, of those behind its start."""
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_splits = tl.num_programs(2)
    members, dims = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    heads = head * GROUP + members
    mask = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    wait_for_inputs()
    if ORDERED:
        row = tl.load(order_ptr + row).to(tl.int64)
    length = tl.load(lens_ptr + row)
    table_ptr += tl.load(rows_ptr + row) * table_stride
    places = row * q_stride * Q_FACTOR + heads[:, None] * HEAD_STRIDE + dims[None, :]
    q = tl.load(q_ptr + places, mask=mask, other=0.0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SHARED_SPLITS > 0:
        first = tl.load(starts_ptr + row)
    share = tl.cdiv(tl.cdiv(length - first, num_splits), TOKENS) * TOKENS
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    highest = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((GROUP_BLOCK,), tl.float32)
    total = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    for start in range(begin, end, TOKENS):
        keys = start + tl.arange(0, TOKENS)
        highest, sums, total = attend_step(
            q, k_ptr, v_ptr, table_ptr, head, dims, members, keys, end, highest, sums, total, scale,
            KV_HEADS, HEAD_DIM, PAGE, 0, CAP, False, False,
        )  # fmt: skip
    # A share without a token has a sum of 0, and a weight of 0 by its highest score, -inf.
    sums = tl.where(sums == 0, 1.0, sums)
    result = total / sums[:, None]
    if SPLIT:
        place = (row * (KV_HEADS * GROUP) + heads) * (num_splits + SHARED_SPLITS)
        place += SHARED_SPLITS + split
        tl.store(sums_ptr + place, highest + tl.log2(sums), mask=members < GROUP)
        tl.store(out_ptr + place[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
    else:
        place = (row * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=mask)


@dispatched
@triton.jit(do_not_specialize=["num_rows"])
def _order_kernel(lens_ptr, order_ptr, num_rows, ROWS: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Count, for some rows, those that come before each."""
    rows, every = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, ALL_ROWS)
    wait_for_inputs()
    own = tl.load(lens_ptr + rows, mask=rows < num_rows, other=0)[:, None]
    others = tl.load(lens_ptr + every, mask=every < num_rows, other=-1)[None, :]
    before = (others > own) | ((others == own) & (every[None, :] < rows[:, None]))
    place = tl.sum(before.to(tl.int32), axis=1)
    tl.store(order_ptr + place, rows, mask=rows < num_rows)


@dispatched
@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_ptr, sums_ptr, starts_ptr, out_ptr, num_splits,
    Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, SHARED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Weigh what the shares of one head of one row found by their sums.

    The first ``SHARED_SPLITS`` shares are those of a prefix, which only some rows have.
    """
    place = tl.program_id(1).to(tl.int64) * Q_HEADS + tl.program_id(0)
    splits, dims = tl.arange(0, SPLIT_BLOCK), tl.arange(0, DIM_BLOCK)
    mask = splits < num_splits
    wait_for_inputs()
    if SHARED_SPLITS > 0:
        start = tl.load(starts_ptr + tl.program_id(1))
        mask = mask & ((splits >= SHARED_SPLITS) | (start > 0))
    sums = tl.load(sums_ptr + place * num_splits + splits, mask=mask, other=float("-inf"))
    weights = tl.exp2(sums - tl.max(sums, axis=0))
    places = (place * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(
        partial_ptr + places, mask=mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
    )
    total = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(
        out_ptr + place * HEAD_DIM + dims, total.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM
    )
