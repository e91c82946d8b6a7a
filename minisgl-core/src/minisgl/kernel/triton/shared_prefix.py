"""Decode of rows that share a prefix: the prefix is read once for all of them.

Queries of a group of rows attend to their prefix together, as a tile of a matrix product; each row
then attends to its own tokens by itself, and both are merged by their sums of weights (cascade
inference: Ye et al., 2024, FlashInfer; Hydragen: Juravsky et al., 2024). Which rows share what lies
on the device, so a recorded launch serves any groups.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.attention import Shares, launch_decode, launch_merge
from minisgl.kernel.triton.attention_step import LOG2_E, PagedRows, Scores, attend_step
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs

_MOST_SPLITS = 32


def shared_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    paged: PagedRows,
    scores: Scores,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    splits: tuple[int, int],
) -> torch.Tensor:
    """Attend with one query a row, to shared prefixes once for each group of rows.

    Args:
        q: ``[R, q_heads, d]``, any stride of a row.
        k_pool: keys of a layer, ``[slots, kv_heads, d]``, contiguous.
        v_pool: values, the same.
        paged: the rows; all of each one's pages, the shared ones first.
        scores: of the layer; no window.
        shared: members, groups and starts, int32: see ``minisgl.attention.batch.SharedPrefixes``.
        splits: shares that a prefix is cut into, and those that a row's own tokens are.

    Returns:
        ``[R, q_heads, d]``, contiguous.
    """
    assert not scores.window, "a window ends inside of a prefix"
    members, groups, starts = shared
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    group = num_q_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shares = Shares.allocate(q, splits[1], splits[0], starts)
    queries, keys, warps, stages = _tile(q.dtype, num_rows * group, group, head_dim)
    # As many as there can be, with two rows in a group at least.
    num_tiles = min(num_rows // (queries // group) + groups.shape[0], max(1, num_rows // 2))
    _prefix_kernel[(num_kv_heads, num_tiles, splits[0])](
        q, k_pool, v_pool, paged.page_table, paged.rows, members, groups,
        shares.partial, shares.sums, scores.scale * LOG2_E, splits[0] + splits[1],
        *factors(q.stride(0)), q.stride(1), paged.page_table.stride(0),
        num_kv_heads, group, head_dim, triton.next_power_of_2(head_dim), paged.page_size,
        queries, keys, groups.shape[0], scores.cap,
        num_warps=warps, num_stages=stages, launch_pdl=OVERLAP,
    )  # fmt: skip
    launch_decode(q, k_pool, v_pool, paged, scores, shares)
    launch_merge(shares, out)
    return out


def choose_prefix_splits(q: torch.Tensor, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Return into how many shares a prefix is cut: as if all rows, ``q``'s, were one group."""
    num_rows, num_q_heads, head_dim = q.shape
    group = num_q_heads // num_kv_heads
    queries = _tile(q.dtype, num_rows * group, group, head_dim)[0]
    programs = num_kv_heads * -(-num_rows // (queries // group))
    # All programs at once, two on a multiprocessor: one more would wait for all the others.
    return max(1, min(_MOST_SPLITS, 2 * num_multiprocessors // programs))


def _tile(
    dtype: torch.dtype, num_queries: int, group: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Return queries and keys of a program's step, warps and pipeline stages."""
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:
        return max(32, least), 32, 4, 2
    if head_dim > 128:
        return max(64, least), 32, 4, 2
    # With 64 queries Hopper's own matrix instructions are used, even if fewer are there.
    return (max(64, least), 64, 4, 3) if num_queries > 64 else (64, 128, 4, 2)


@dispatched
@triton.jit(do_not_specialize=["q_stride", "table_stride", "num_shares"])
def _prefix_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, members_ptr, groups_ptr, out_ptr, sums_ptr, scale,
    num_shares, q_stride, Q_FACTOR: tl.constexpr, HEAD_STRIDE: tl.constexpr, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, MOST_GROUPS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attend to a share of a prefix with a KV head's queries of a tile of its rows."""
    most: tl.constexpr = QUERIES // GROUP  # rows of a tile
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    every, lanes, dims = (
        tl.arange(0, MOST_GROUPS),
        tl.arange(0, QUERIES),
        tl.arange(0, DIM_BLOCK),
    )
    wait_for_inputs()
    # Which group this tile belongs to: the number of those whose tiles all come before.
    tiles = tl.cdiv(tl.load(groups_ptr + every * 3 + 1), most)
    group = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    if group >= MOST_GROUPS:
        return
    tile -= tl.sum(tl.where(every < group, tiles, 0), axis=0)
    first = tl.load(groups_ptr + group * 3)
    count = tl.load(groups_ptr + group * 3 + 1)
    length = tl.load(groups_ptr + group * 3 + 2)
    # All members have the prefix's pages: those of the first are read.
    leader = tl.load(members_ptr + first)
    table_ptr += tl.load(rows_ptr + leader) * table_stride
    member = tile * most + lanes // GROUP
    present = (lanes < most * GROUP) & (member < count)
    place = tl.load(members_ptr + first + member, mask=present, other=0).to(tl.int64)
    head = kv_head * GROUP + lanes % GROUP
    mask = present[:, None] & (dims < HEAD_DIM)[None, :]
    starts = place * q_stride * Q_FACTOR + head * HEAD_STRIDE
    q = tl.load(q_ptr + starts[:, None] + dims[None, :], mask=mask, other=0.0)
    share = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), KEYS) * KEYS
    begin = split * share
    end = tl.minimum(begin + share, length)
    whole = begin + tl.maximum(end - begin, 0) // KEYS * KEYS
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    sums = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, DIM_BLOCK), tl.float32)
    for start in range(begin, whole, KEYS):
        keys = start + tl.arange(0, KEYS)
        highest, sums, total = attend_step(
            q, k_ptr, v_ptr, table_ptr, kv_head, dims, lanes, keys, end, highest, sums, total,
            scale, KV_HEADS, HEAD_DIM, PAGE, 0, CAP, False, True,
        )  # fmt: skip
    if whole < end:
        keys = whole + tl.arange(0, KEYS)
        highest, sums, total = attend_step(
            q, k_ptr, v_ptr, table_ptr, kv_head, dims, lanes, keys, end, highest, sums, total,
            scale, KV_HEADS, HEAD_DIM, PAGE, 0, CAP, False, False,
        )  # fmt: skip
    # A share without a token has a sum of 0, and a weight of 0 by its highest score, -inf.
    sums = tl.where(sums == 0, 1.0, sums)
    result = total / sums[:, None]
    share_place = (place * (KV_HEADS * GROUP) + head) * num_shares + split
    tl.store(sums_ptr + share_place, highest + tl.log2(sums), mask=present)
    tl.store(out_ptr + share_place[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
