"""From router logits to work: the experts of each token, and tiles of tokens of one expert.

An assignment is one of a token's ``top_k`` experts; its number is ``token * top_k + place``. Sorted
by expert, and by number within one, assignments form rows; a tile is at most ``tile_rows`` of
them, all of one expert. No shape depends on the routing: ``Tiles`` has room for the largest number
there can be, and the real one is on the device.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, wait_for_inputs

_BLOCKS: Final = (256, 1024, 2048, 4096)
"""Assignments that a program of the sort in one kernel reads at once: the first that holds all."""

_CHUNK: Final = 256
"""Assignments of a program of the sort in two kernels, which is for more than those."""

_COUNTED: Final = 32
"""Chunks whose counts are added up at once."""

SORT_SIZES: Final = (*_BLOCKS, _BLOCKS[-1] + 1)
"""The most assignments that each kind of sort that is compiled is for; the last is for any."""


@dataclass(frozen=True, slots=True)
class Routed:
    """What the router chose, a row a token.

    Attributes:
        experts: int32 ``[T, top_k]``, contiguous, numbers of the whole layer.
        weights: float32 ``[T, top_k]``, contiguous.
        first: number of the expert whose weights come first in this rank's stacks. Those that the
            stacks do not hold are skipped, and so is -1.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    first: int = 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """Assignments sorted by expert.

    Attributes:
        order: int32 ``[T * top_k]``, the assignment of each row.
        tiles: int32 ``[1 + 3 * most]``: the number of tiles, then expert, first row, and the row
            behind the last of the expert, for each.
        most: the most tiles that there can be.
        rows: of a tile.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    most: int
    rows: int


def route(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and numbers of each token's experts: see ``MoeBackend.route``."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    _route_kernel[(tokens,)](
        logits, chosen, weights, logits.stride(0), experts, top_k, renormalize,
        triton.next_power_of_2(experts), num_warps=1, launch_pdl=OVERLAP,
    )  # fmt: skip
    return weights, chosen


def sort_by_expert(routed: Routed, num_experts: int, tile_rows: int) -> Tiles:
    """Sort the assignments; those to experts that are not held are left out.

    Args:
        routed: experts of each token.
        num_experts: that are held.
        tile_rows: rows of a tile.
    """
    chosen = routed.experts
    num = chosen.numel()
    most = most_tiles(num, num_experts, tile_rows)
    order = torch.empty(num, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(1 + 3 * most, dtype=torch.int32, device=chosen.device)
    bins = triton.next_power_of_2(num_experts + 1)
    block = next((block for block in _BLOCKS if block >= num), None)
    if block is not None:
        _sort_kernel[(num_experts,)](
            chosen, order, tiles, num, routed.first, tile_rows, num_experts, bins, block,
            num_warps=4 if block <= 1024 else 8, launch_pdl=OVERLAP,
        )  # fmt: skip
        return Tiles(order, tiles, most, tile_rows)
    chunks = -(-num // _CHUNK)
    counts = torch.empty((chunks, num_experts), dtype=torch.int32, device=chosen.device)
    _count_kernel[(chunks,)](
        chosen, counts, num, routed.first, num_experts, bins, _CHUNK,
        num_warps=4, launch_pdl=OVERLAP,
    )  # fmt: skip
    _place_kernel[(chunks,)](
        chosen, counts, order, tiles, num, chunks, routed.first, tile_rows,
        num_experts, bins, _CHUNK, _COUNTED, num_warps=8, launch_pdl=OVERLAP,
    )  # fmt: skip
    return Tiles(order, tiles, most, tile_rows)


def most_tiles(num_assignments: int, num_experts: int, tile_rows: int) -> int:
    """Return the most tiles of ``tile_rows`` that any routing makes of so many assignments."""
    begun = min(num_assignments, num_experts)  # each of these experts may have one tile not full
    return begun + (num_assignments - begun) // tile_rows


@dispatched
@triton.jit(do_not_specialize=["stride"])
def _route_kernel(
    logits_ptr, experts_ptr, weights_ptr, stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token, one warp: the largest logit, ``TOP_K`` times.

    Logits are compared as integers that hold their expert, too: one maximum finds both. What was
    chosen stays with the thread that has it until it is stored.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    wait_for_inputs()
    logits = tl.load(logits_ptr + token * stride + expert, inside, 0.0)
    bits: tl.constexpr = logits.dtype.primitive_bitwidth
    number = _ordered(logits, bits)
    last: tl.constexpr = (1 << bits) - 1
    least: tl.constexpr = -(1 << (2 * bits - 1))
    keys = tl.where(inside, (number << bits) | (last - expert.to(number.dtype)), least)
    place = tl.full((BLOCK,), -1, tl.int32)
    for one in tl.static_range(TOP_K):
        largest = keys == tl.max(keys, axis=0)
        place = tl.where(largest, one, place)
        keys = tl.where(largest, least, keys)
    logits = tl.where(inside, logits.to(tl.float32), float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0))
    chosen = inside & (place >= 0)
    weights /= tl.sum(tl.where(chosen, weights, 0.0) if RENORMALIZE else weights, axis=0)
    tl.store(experts_ptr + token * TOP_K + place, expert, chosen)
    tl.store(weights_ptr + token * TOP_K + place, weights, chosen)


@triton.jit
def _ordered(logits, BITS: tl.constexpr):
    """Return integers of twice the bits that are ordered as the logits are."""
    logits = tl.where(logits == 0, tl.zeros_like(logits), logits)  # -0 is no less than 0
    if BITS == 16:
        number = logits.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        number = logits.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(number < 0, number ^ ((1 << (BITS - 1)) - 1), number)


@dispatched
@triton.jit(do_not_specialize=["num", "held", "tile_rows"])
def _sort_kernel(
    chosen_ptr, order_ptr, tiles_ptr, num, held, tile_rows,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows and tiles of one expert: every program counts all assignments."""
    mine = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    wait_for_inputs()
    chosen = _expert(chosen_ptr, place, num, held, EXPERTS)
    counts = tl.histogram(chosen, BINS)
    row = _write_tiles(tiles_ptr, counts, mine, tile_rows, num, EXPERTS, BINS, BLOCK)
    found = chosen == mine
    rank = tl.cumsum(found.to(tl.int32), axis=0) - 1
    tl.store(order_ptr + row + rank, place, found)


@dispatched
@triton.jit(do_not_specialize=["num", "held"])
def _count_kernel(
    chosen_ptr, counts_ptr, num, held,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many of a chunk's assignments each expert has."""
    chunk, bins = tl.program_id(0), tl.arange(0, BINS)
    wait_for_inputs()
    chosen = _expert(chosen_ptr, chunk * CHUNK + tl.arange(0, CHUNK), num, held, EXPERTS)
    tl.store(counts_ptr + chunk * EXPERTS + bins, tl.histogram(chosen, BINS), bins < EXPERTS)


@dispatched
@triton.jit(do_not_specialize=["num", "chunks", "held", "tile_rows"])
def _place_kernel(
    chosen_ptr, counts_ptr, order_ptr, tiles_ptr, num, chunks, held, tile_rows,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The rows of a chunk's assignments, and the tiles of some experts."""
    mine, bins, place = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, CHUNK)
    wait_for_inputs()
    counts = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first in range(0, chunks, COUNTED):
        chunk = first + tl.arange(0, COUNTED)
        known = (chunk < chunks)[:, None] & (bins < EXPERTS)[None, :]
        some = tl.load(counts_ptr + chunk[:, None] * EXPERTS + bins[None, :], known, 0)
        counts += tl.sum(some, axis=0)
        before += tl.sum(tl.where((chunk < mine)[:, None], some, 0), axis=0)
    for expert in range(mine, EXPERTS, chunks):
        _write_tiles(tiles_ptr, counts, expert, tile_rows, num, EXPERTS, BINS, CHUNK)
    chosen = _expert(chosen_ptr, mine * CHUNK + place, num, held, EXPERTS)
    rank = tl.zeros((CHUNK,), tl.int32)
    for first in tl.static_range(0, CHUNK, COUNTED):
        other = first + tl.arange(0, COUNTED)
        theirs = _expert(chosen_ptr, mine * CHUNK + other, num, held, EXPERTS)
        earlier = (theirs[None, :] == chosen[:, None]) & (other[None, :] < place[:, None])
        rank += tl.sum(earlier.to(tl.int32), axis=1)
    starts = tl.cumsum(counts, axis=0) - counts + before
    row = tl.gather(starts, chosen, axis=0) + rank
    tl.store(order_ptr + row, mine * CHUNK + place, chosen < EXPERTS)


@triton.jit
def _expert(chosen_ptr, place, num, held, EXPERTS: tl.constexpr):
    """Return each assignment's expert among the held ones; ``EXPERTS`` if there is none."""
    chosen = tl.load(chosen_ptr + place, place < num, -1) - held
    return tl.where((place < num) & (chosen >= 0) & (chosen < EXPERTS), chosen, EXPERTS)


@triton.jit
def _write_tiles(
    tiles_ptr, counts, expert, tile_rows, num,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tiles of an expert, and their number if it is the last; return its first row."""
    bins, place = tl.arange(0, BINS), tl.arange(0, BLOCK)
    counts = tl.where(bins < EXPERTS, counts, 0)
    begun = (counts + tile_rows - 1) // tile_rows
    row = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    tile = tl.sum(tl.where(bins < expert, begun, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    if expert == EXPERTS - 1:
        tl.store(tiles_ptr, tl.sum(begun, axis=0))
    for first in range(0, num, BLOCK * tile_rows):  # once, but for very many
        start = first + place * tile_rows
        ptrs = tiles_ptr + 1 + 3 * (tile + first // tile_rows + place)
        tl.store(ptrs, expert, start < count)
        tl.store(ptrs + 1, row + start, start < count)
        tl.store(ptrs + 2, row + count, start < count)
    return row
