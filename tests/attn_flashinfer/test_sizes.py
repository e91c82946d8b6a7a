"""Bounds of the planners' memory, against the planner's own arithmetic written out."""

import pytest

from minisgl_attn_flashinfer.sizes import (
    Shape,
    decode_int_workspace_bytes,
    float_workspace_bytes,
)

SHAPES = [
    Shape(num_q_heads=q, num_kv_heads=kv, head_dim=dim, page_size=16, num_sms=sms)
    for q, kv in ((16, 8), (40, 8), (32, 4), (64, 8), (8, 8), (8, 1), (96, 1), (1, 1))
    for dim in (64, 128, 256)
    for sms in (132, 108, 20)
]


def tile_of(packed: int, head_dim: int) -> int:
    if packed > 64 and head_dim < 256:
        return 128
    return 64 if packed > 16 else 16


def tensor_core_plan(shape: Shape, rows: int, packed: int) -> tuple[int, int]:
    """padded_batch_size and cta_tile_q of PrefillSplitQOKVIndptr with enable_cuda_graph."""
    limit = 2 * shape.num_sms // shape.num_kv_heads
    tile = tile_of(packed, shape.head_dim)
    tiles = -(-rows * shape.group // tile) + rows - 1
    return max(limit, tiles), tile


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partial_results_of_split_decode_fit(shape):
    limit = 2 * shape.num_sms // shape.num_kv_heads
    given = float_workspace_bytes(shape, prefill_fa2=False)
    for rows in range(1, max(limit, 2)):
        pieces, tile = tensor_core_plan(shape, rows, shape.group)
        values = shape.num_q_heads * pieces * tile * shape.head_dim * 4
        sums = shape.num_q_heads * pieces * tile * 4
        assert values + sums + 32 <= given


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partial_results_of_split_prefill_fit(shape):
    limit = 2 * shape.num_sms // shape.num_kv_heads
    tile = tile_of(1000, shape.head_dim)
    needed = shape.num_q_heads * limit * tile * (shape.head_dim + 1) * 4
    assert needed <= float_workspace_bytes(shape, prefill_fa2=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 33, 256, 1024])
def test_schedules_of_decode_fit(shape, rows):
    pieces, _ = tensor_core_plan(shape, rows, shape.group)
    pieces = max(pieces, 16 * shape.num_sms // shape.num_kv_heads)
    # request, query tile and KV tile of a piece; o_indptr, merge_indptr; chunk, rows; valid mask.
    lists = [4 * pieces] * 3 + [4 * (rows + 1)] * 2 + [4, 4, pieces]
    needed = sum(-(-size // 16) * 16 for size in lists)
    # CUDA cores lay out o_indptr for all pieces.
    cuda_cores = sum(-(-size // 16) * 16 for size in (*[4 * pieces + 4] * 3, 4, pieces))
    assert max(needed, cuda_cores) <= decode_int_workspace_bytes(shape, rows)


def test_a_small_model_s_workspace_is_far_below_what_flashinfer_recommends():
    shape = Shape(num_q_heads=16, num_kv_heads=8, head_dim=128, page_size=16, num_sms=132)
    assert float_workspace_bytes(shape, prefill_fa2=False) <= 8 * 2**20
    assert float_workspace_bytes(shape, prefill_fa2=True) <= 40 * 2**20


def test_a_wide_group_needs_more_than_that():
    """The case in which FlashInfer's recommended 128 MiB overflow."""
    shape = Shape(num_q_heads=64, num_kv_heads=8, head_dim=128, page_size=16, num_sms=132)
    assert float_workspace_bytes(shape, prefill_fa2=True) > 128 * 2**20


@pytest.mark.parametrize(("kv_heads", "rows"), [(8, 33), (4, 66), (1, 264), (264, 1), (1000, 1)])
def test_rows_from_which_none_is_split(kv_heads, rows):
    shape = Shape(
        num_q_heads=kv_heads, num_kv_heads=kv_heads, head_dim=64, page_size=16, num_sms=132
    )
    assert shape.unsplit_rows == rows
