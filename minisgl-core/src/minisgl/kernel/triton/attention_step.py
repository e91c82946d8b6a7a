"""What attention kernels share: rows of the pool, scores, and one step of the running softmax."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

LOG2_E = 1.4426950408889634
"""Scores are exponents of 2: scales are multiplied with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """Rows of the pool that queries see.

    Attributes:
        page_table: int32 ``[table rows, width]``.
        rows: int64 ``[R]``: rows of the table.
        kv_lens: int32 ``[R]``: tokens of each, at least 1.
        page_size: tokens a page.
        order: int32 ``[R]``: which row is attended to first, second and so on: see
            ``minisgl.kernel.triton.attention.longest_first``; ``None``: the first, the second.
    """

    page_table: torch.Tensor
    rows: torch.Tensor
    kv_lens: torch.Tensor
    page_size: int
    order: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How scores are made of products.

    Attributes:
        scale: what products are multiplied with.
        window: a query sees so many tokens, itself included; 0: all before it.
        cap: scores become ``cap * tanh(score / cap)``; 0 leaves them.
    """

    scale: float
    window: int = 0
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of a program, keys of one of its steps, warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _dot(a, b, total):
    """Return ``a @ b + total`` in float32, exact products of float32 included."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def attend_step(
    q, k_ptr, v_ptr, table_ptr, head, dims, query_places, keys, limit, state_max, state_sum, total,
    scale, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Take the scores of some keys into the running maximum, sum and weighted values.

    With ``ALL`` every query sees every one of these keys; otherwise keys end at ``limit``.
    """
    inside = keys < limit
    if ALL:
        pages = tl.load(table_ptr + keys // PAGE)
    else:
        pages = tl.load(table_ptr + keys // PAGE, mask=inside, other=0)
    slots = pages.to(tl.int64) * PAGE + keys % PAGE
    places = (slots * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    # What lies behind a row's last token may be no number, and 0 times that is none either.
    if ALL:
        if dims.shape[0] == HEAD_DIM:
            k = tl.load(k_ptr + places)
            v = tl.load(v_ptr + places)
        else:
            k = tl.load(k_ptr + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_ptr + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + places, mask=mask, other=0.0)
        v = tl.load(v_ptr + places, mask=mask, other=0.0)
    zero = tl.zeros((q.shape[0], keys.shape[0]), tl.float32)
    scores = _dot(q, tl.trans(k), zero) * scale
    if CAP > 0:
        limit_of_scores = CAP * 1.4426950408889634
        bent = 2 / (1 + tl.exp2(-2 * scores / CAP)) - 1
        scores = limit_of_scores * bent
    if not ALL:
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= query_places[:, None])
        if WINDOW > 0:
            seen = seen & (keys[None, :] > query_places[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(state_max, tl.max(scores, axis=1))
    # Of a query that has seen nothing yet all weights are 0, not those of -inf minus -inf.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(state_max - base)
    state_sum = state_sum * kept + tl.sum(weights, axis=1)
    total = _dot(weights.to(v.dtype), v, total * kept[:, None])
    return highest, state_sum, total
