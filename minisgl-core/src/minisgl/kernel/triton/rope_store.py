"""q/k norms, rotation and the store of K and V: one read and one write of each element.

Compiled per dtype, heads, head dim, rotary dim and the pool's strides.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from minisgl.kernel.rotation import Rotation
from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs

_TILE_HEADS = 16
"""Heads of one token that a program takes."""


def rope(
    qk: torch.Tensor,
    num_q_heads: int,
    rotation: Rotation,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k into new contiguous tensors; see ``Rope``."""
    tokens, heads, dim = qk.shape
    q = torch.empty((tokens, num_q_heads, dim), dtype=qk.dtype, device=qk.device)
    k = torch.empty((tokens, heads - num_q_heads, dim), dtype=qk.dtype, device=qk.device)
    # Without v heads and with every token in its own place, the rest is the same kernel.
    _launch(
        qk, num_q_heads, heads - num_q_heads, 0, rotation, None, q, k, k, q_norm, k_norm, norm_eps
    )
    return q, k


def rope_store(
    qkv: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    rotation: Rotation,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
) -> torch.Tensor:
    """Rotate q into a new tensor, store k and v in the pool; see ``RopeStore``."""
    q = torch.empty((qkv.shape[0], num_q_heads, qkv.shape[2]), dtype=qkv.dtype, device=qkv.device)
    _launch(
        qkv, num_q_heads, num_kv_heads, num_kv_heads, rotation, slots, q, k_pool, v_pool,
        q_norm, k_norm, norm_eps,
    )  # fmt: skip
    return q


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Write K and V to their slots; see ``StoreKV``."""
    tokens, heads, dim = k.shape
    # As if each head were one half.
    programs, (_, block, _, _, tile_heads), num_warps = _layout(heads, dim, 2 * dim)
    k_strides, v_strides = k.stride(), v.stride()
    _store_kernel[(tokens, programs)](
        k, v, slots, k_pool, v_pool,
        *factors(k_strides[0]), k_strides[1], *factors(v_strides[0]), v_strides[1],
        *k_pool.stride()[:2], *v_pool.stride()[:2],
        heads, dim, tile_heads, block, num_warps=num_warps, launch_pdl=OVERLAP,
    )  # fmt: skip


def _launch(
    x: torch.Tensor,
    num_q: int,
    num_k: int,
    num_v: int,
    rotation: Rotation,
    slots: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
) -> None:
    """Launch over ``x`` ``[T, num_q + num_k + num_v, d]``.

    ``k`` and ``v`` are written at ``slots``, or at each token's own number without them.
    """
    row_stride, head_stride, element_stride = x.stride()
    if element_stride != 1:
        x = x.contiguous()
        row_stride, head_stride, _ = x.stride()
    cos_sin, positions = rotation.cos_sin, rotation.positions
    dim = q.shape[2]
    programs, tiles, num_warps = _layout(num_q + num_k + num_v, dim, cos_sin.shape[1])
    normed = q_norm is not None and k_norm is not None
    _rope_kernel[(q.shape[0], programs)](
        x, positions, cos_sin, q_norm if normed else x, k_norm if normed else x,
        positions if slots is None else slots, q, k, v, norm_eps,
        *factors(row_stride), head_stride, *k.stride()[:2], *v.stride()[:2],
        num_q, num_k, num_v, dim, *tiles, normed, slots is not None,
        num_warps=num_warps, launch_pdl=OVERLAP,
    )  # fmt: skip


@lru_cache
def _layout(heads: int, dim: int, rotary_dim: int) -> tuple[int, tuple[int, ...], int]:
    """Return programs of a token, sizes of their tiles, and warps.

    Sizes: half the rotary dim, the power of two that holds it, the rest of a head, the power of two
    that holds that, heads. Eight elements of a half a thread: with 16-bit ones a load of 16 bytes.
    """
    half, rest = rotary_dim // 2, dim - rotary_dim
    block = triton.next_power_of_2(half)
    tile_heads = min(triton.next_power_of_2(heads), _TILE_HEADS)
    tiles = (half, block, rest, triton.next_power_of_2(max(rest, 1)), tile_heads)
    return -(-heads // tile_heads), tiles, min(max(tile_heads * block // 256, 1), 8)


@dispatched
@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr", "row_stride"])
def _rope_kernel(
    x_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, eps,
    row_stride, FACTOR: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
    NUM_Q: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    TILE_HEADS: tl.constexpr, NORMED: tl.constexpr, SLOTTED: tl.constexpr,
):  # fmt: skip
    """One token's heads in ``[TILE_HEADS, .]`` tiles: first half, second half, unrotated rest."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    real = heads < NUM_Q + NUM_K + NUM_V
    inside = columns < HALF
    dtype = q_ptr.dtype.element_ty

    wait_for_inputs()
    position = tl.load(positions_ptr + token).to(tl.int64)
    place = tl.load(slots_ptr + token).to(tl.int64) if SLOTTED else token
    x_ptrs = x_ptr + token * row_stride * FACTOR + heads * HEAD_STRIDE
    first = tl.load(x_ptrs + columns, mask=real & inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + HALF + columns, mask=real & inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + columns, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + columns, mask=inside, other=0.0)
    rest_columns = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    rest_inside = rest_columns < DIM
    if REST > 0:
        rest = tl.load(x_ptrs + rest_columns, mask=real & rest_inside, other=0.0).to(tl.float32)

    is_q, is_v = heads < NUM_Q, heads >= NUM_Q + NUM_K
    if NORMED:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / DIM + eps)
        first = _normed(first, scale, q_norm_ptr, k_norm_ptr, columns, inside, is_q, is_v, dtype)
        second = _normed(
            second, scale, q_norm_ptr, k_norm_ptr, HALF + columns, inside, is_q, is_v, dtype
        )
        if REST > 0:
            rest = _normed(
                rest, scale, q_norm_ptr, k_norm_ptr, rest_columns, rest_inside, is_q, is_v, dtype
            )
    turned = tl.where(is_v, first, first * cos - second * sin)
    second = tl.where(is_v, second, second * cos + first * sin)

    q_ptrs = q_ptr + token * (NUM_Q * DIM) + heads * DIM
    k_ptrs = k_ptr + place * K_STRIDE + (heads - NUM_Q) * K_HEAD_STRIDE
    v_ptrs = v_ptr + place * V_STRIDE + (heads - NUM_Q - NUM_K) * V_HEAD_STRIDE
    stored = place >= 0
    to_k = (heads >= NUM_Q) & (heads < NUM_Q + NUM_K) & stored
    to_v = is_v & real & stored
    k_dtype = k_ptr.dtype.element_ty
    tl.store(q_ptrs + columns, turned.to(dtype), mask=is_q & inside)
    tl.store(q_ptrs + HALF + columns, second.to(dtype), mask=is_q & inside)
    tl.store(k_ptrs + columns, turned.to(dtype).to(k_dtype), mask=to_k & inside)
    tl.store(k_ptrs + HALF + columns, second.to(dtype).to(k_dtype), mask=to_k & inside)
    if NUM_V > 0:
        tl.store(v_ptrs + columns, turned.to(dtype).to(k_dtype), mask=to_v & inside)
        tl.store(v_ptrs + HALF + columns, second.to(dtype).to(k_dtype), mask=to_v & inside)
    if REST > 0:
        tl.store(q_ptrs + rest_columns, rest.to(dtype), mask=is_q & rest_inside)
        tl.store(k_ptrs + rest_columns, rest.to(dtype).to(k_dtype), mask=to_k & rest_inside)
        if NUM_V > 0:
            tl.store(v_ptrs + rest_columns, rest.to(dtype).to(k_dtype), mask=to_v & rest_inside)


@triton.jit
def _normed(x, scale, q_norm_ptr, k_norm_ptr, columns, inside, is_q, is_v, dtype: tl.constexpr):
    """Norm q and k heads, rounding where the reference does; v heads pass."""
    q_weight = tl.load(q_norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (x * scale).to(dtype).to(tl.float32) * tl.where(is_q, q_weight, k_weight)
    return tl.where(is_v, x, normed.to(dtype).to(tl.float32))


@dispatched
@triton.jit(do_not_specialize=["slots_ptr", "k_stride", "v_stride"])
def _store_kernel(
    k_ptr, v_ptr, slots_ptr, k_pool_ptr, v_pool_ptr,
    k_stride, K_FACTOR: tl.constexpr, K_HEAD_STRIDE: tl.constexpr,
    v_stride, V_FACTOR: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
    K_POOL_STRIDE: tl.constexpr, K_POOL_HEAD_STRIDE: tl.constexpr,
    V_POOL_STRIDE: tl.constexpr, V_POOL_HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILE_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (heads < HEADS) & (columns < DIM)
    wait_for_inputs()
    k_row = k_ptr + token * k_stride * K_FACTOR
    v_row = v_ptr + token * v_stride * V_FACTOR
    k = tl.load(k_row + heads * K_HEAD_STRIDE + columns, mask=mask)
    v = tl.load(v_row + heads * V_HEAD_STRIDE + columns, mask=mask)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    mask = mask & (slot >= 0)
    k_ptrs = k_pool_ptr + slot * K_POOL_STRIDE + heads * K_POOL_HEAD_STRIDE + columns
    v_ptrs = v_pool_ptr + slot * V_POOL_STRIDE + heads * V_POOL_HEAD_STRIDE + columns
    tl.store(k_ptrs, k.to(k_pool_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptrs, v.to(v_pool_ptr.dtype.element_ty), mask=mask)
