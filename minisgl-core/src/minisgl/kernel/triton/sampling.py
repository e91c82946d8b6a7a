"""Gumbel-max sampling over blocks of the vocabulary, straight from the logits.

Two launches: each program draws the best token of one block of one row, then one program a row
picks among its blocks. Blocks are of one size, so that a row's token depends on no other row.
Compiled per dtype of the logits and size of the vocabulary.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs

BLOCK, NUM_WARPS = 1024, 1
"""Tokens of a block: 32 a thread, and no warp waits for another one."""

LANES = tl.constexpr(8)
"""Neighbouring tokens of a thread, 16 bytes of a half-precision row."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Without a GPU there is no assembly either."""


def sample_gumbel(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the next tokens; see ``SampleGumbel``.

    The random bits are the reference's; logarithms and powers are approximated, so where two
    scores are within 1e-5 of each other the other token may win.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    draws = Draws(logits)
    none = draws.tokens
    draw_blocks_kernel[(draws.rows, draws.blocks)](
        logits, temperature, temperature, temperature, none, none, none,
        seed, positions, draws.largest, draws.scores, draws.tokens, *factors(logits.stride(0)),
        logits.shape[1], draws.blocks, 1, 0, False, BLOCK,
        num_warps=NUM_WARPS, launch_pdl=OVERLAP,
    )  # fmt: skip
    return draws.pick(temperature)


class Draws:
    """The best token of each block, and which of them is each row's.

    Attributes:
        rows, blocks: of the logits.
        largest: float32 ``[rows, blocks]``: largest logit of the block.
        scores: float32, the same shape: best score, as if that logit were 0.
        tokens: int32, the same shape: who has it.
    """

    __slots__ = ("blocks", "largest", "rows", "scores", "tokens")

    def __init__(self, logits: torch.Tensor) -> None:
        self.rows = logits.shape[0]
        self.blocks = -(-logits.shape[1] // BLOCK)
        shape, device = (self.rows, self.blocks), logits.device
        self.largest = torch.empty(shape, dtype=torch.float32, device=device)
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.tokens = torch.empty(shape, dtype=torch.int32, device=device)

    def pick(self, temperature: torch.Tensor) -> torch.Tensor:
        """Return each row's token, int64."""
        out = torch.empty(self.rows, dtype=torch.int64, device=temperature.device)
        _pick_kernel[(self.rows,)](
            self.largest, self.scores, self.tokens, temperature, out,
            self.blocks, triton.next_power_of_2(self.blocks),
            num_warps=NUM_WARPS, launch_pdl=OVERLAP,
        )  # fmt: skip
        return out


@triton.jit
def load_logits(row_ptr, columns, VOCAB: tl.constexpr):
    """Return float32 logits; infinity, and what is not a number, as the largest number."""
    x = tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(x < 3.4028234663852886e38, x, 3.4028234663852886e38)


@triton.jit
def scale_of(temperature):
    """What differences of logits are multiplied with, in units of powers of two; 1 if greedy.

    A tiny temperature is as good as a tinier one.
    """
    return tl.where(temperature > 0.0, 1.4426950408889634 / tl.maximum(temperature, 1e-30), 1.0)


@triton.jit
def ordered(x):
    """Map float32 to int32 in the same order; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def mix(x):
    """Finalise a 32-bit hash, uint32; see the reference."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def log2(x):
    """Logarithm of a normal number, within 2^-22, absolute near 1 and relative elsewhere."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exp2(x):
    """Power of two within 2^-22, relative; without the care that tiny results would take."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def uniform_noise(seed, position, tokens):
    """Return a row's random numbers between 0 and 1, float32; the reference's, bit for bit."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    first = mix(low ^ mix(place * 0x9E3779B9 + high))
    second = mix(first * 0x9E3779B9 + (high ^ place))
    bits = tokens * 0x9E3779B9 + first
    bits = (bits ^ (bits >> 16) ^ second) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15)) * 0xD35A2D97
    # 23 random bits as the mantissa of a number in [1, 2).
    return ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - (1.0 - 2.0**-24)


@triton.jit
def least_wait(uniform, ratios):
    """Return what exponential noise is at least, times ``ratios``; exact up to uniform 0.3.

    That is ``-ln(1 - uniform)``, by a polynomial within 2e-6, which beyond 0.3 lies below it.
    """
    series = 0.18726901 + uniform * 0.40624898
    series = 0.34056345 + uniform * series
    series = 0.49971689 + uniform * series
    series = 1.00000175 + uniform * series
    return series * uniform * ratios


@triton.jit
def _marked(x, lanes):
    """Return ``x`` with the lane as its last bits, in one instruction."""
    if INTERPRETED:
        return (x & -LANES) | lanes
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [x, -LANES, lanes], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def first_wait(waits):
    """Return the least of ``waits``, ``[groups, lanes]`` and not negative, and its place.

    Within a group the lane travels in the last bits, which takes up to 2^-20 from the wait.
    """
    groups, lanes = tl.arange(0, waits.shape[0]), tl.arange(0, LANES)[None, :]
    marked = tl.min(_marked(waits.to(tl.int32, bitcast=True), lanes), axis=1)
    best = tl.min(marked, axis=0)
    group = tl.min(tl.where(marked == best, groups, waits.shape[0]), axis=0)
    return (best & -LANES).to(tl.float32, bitcast=True), group * LANES + (best & (LANES - 1))


@dispatched
@triton.jit(
    do_not_specialize=[
        "temperature_ptr", "min_p_ptr", "row_max_ptr", "border_ptr", "ties_ptr", "seed_ptr",
        "positions_ptr", "row_stride",
    ]
)  # fmt: skip
def draw_blocks_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, row_max_ptr, border_ptr, ties_ptr, tied_ptr,
    seed_ptr, positions_ptr, largest_ptr, score_ptr, token_ptr,
    row_stride, FACTOR: tl.constexpr,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POWER: tl.constexpr,
    UNUSED_BITS: tl.constexpr, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of one block; with ``FILTERED`` among those that pass (see ``filters``).

    Instead of the largest logit plus noise, the least exponential noise ("wait") over likelihood:
    the same token, and one power of two less. For all but a few blocks a polynomial settles it.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = block * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)
    columns = groups[:, None] * LANES + tl.arange(0, LANES)[None, :]
    wait_for_inputs()
    row_ptr = logits_ptr + row * row_stride * FACTOR
    x = load_logits(row_ptr, columns, VOCAB)
    temperature = tl.load(temperature_ptr + row)
    largest = tl.max(tl.max(x, axis=1), axis=0)
    score = tl.full((), 0.0, tl.float32)
    if temperature > 0.0:
        if FILTERED:
            border = tl.load(border_ptr + row)
            # Most blocks have no token that passes: nothing of theirs needs noise.
            hopeful = (ordered(largest) >> UNUSED_BITS) >= border
        else:
            hopeful = True
        place = tl.full((), 0, tl.int32)
        score = tl.full((), float("-inf"), tl.float32)
        if hopeful:
            scale = scale_of(temperature)
            ratios = exp2((tl.where(largest == float("-inf"), 0.0, largest) - x) * scale)
            if FILTERED:
                likely = (x - tl.load(row_max_ptr + row)) * scale
                passes = likely >= tl.log2(tl.load(min_p_ptr + row))
                keys = ordered(x) >> UNUSED_BITS
                # Of the tokens at the border, the first few in the order of ids pass.
                ties, others = tl.load(ties_ptr + row), tl.arange(0, BLOCKS_POWER)
                tied = (keys == border).to(tl.int32)
                earlier = (others < block) & (ties > 0)
                before = tl.load(tied_ptr + row * BLOCKS + others, mask=earlier, other=0)
                rank = tl.cumsum(tl.reshape(tied, (BLOCK,)), axis=0)
                rank = tl.sum(before, axis=0) + tl.reshape(rank, (BLOCK // LANES, LANES))
                passes &= (keys > border) | ((tied > 0) & (rank <= ties))
                ratios = tl.where(passes, ratios, float("inf"))
            seed, position = tl.load(seed_ptr + row), tl.load(positions_ptr + row)
            uniform = uniform_noise(seed, position, columns.to(tl.uint32))
            wait, place = first_wait(least_wait(uniform, ratios))
            # No ratio is below 1: so the winner's noise is less than this too, and exact.
            if wait > 0.35:
                waits = -0.69314718055994531 * log2(1.0 - uniform) * ratios
                waits = tl.where(uniform < 0.3, least_wait(uniform, ratios), waits)
                wait, place = first_wait(waits)
            score = -tl.log2(wait)
    else:
        lane = tl.min(tl.where(x == largest, tl.arange(0, LANES)[None, :], LANES), axis=1)
        first = tl.where(lane < LANES, tl.arange(0, BLOCK // LANES) * LANES + lane, BLOCK)
        place = tl.min(first, axis=0)
    out = row * BLOCKS + block
    tl.store(largest_ptr + out, largest)
    tl.store(score_ptr + out, score)
    tl.store(token_ptr + out, block * BLOCK + place)


@dispatched
@triton.jit(do_not_specialize=["temperature_ptr"])
def _pick_kernel(
    largest_ptr, score_ptr, token_ptr, temperature_ptr, out_ptr,
    BLOCKS: tl.constexpr, BLOCKS_POWER: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS_POWER)
    mask = blocks < BLOCKS
    at = row * BLOCKS + blocks
    largest = tl.load(largest_ptr + at, mask=mask, other=float("-inf"))
    score = tl.load(score_ptr + at, mask=mask, other=float("-inf"))
    top = tl.max(largest, axis=0)
    scale = scale_of(tl.load(temperature_ptr + row))
    score += (largest - tl.where(top == float("-inf"), 0.0, top)) * scale
    _, place = tl.max(score, axis=0, return_indices=True)
    tl.store(out_ptr + row, tl.load(token_ptr + row * BLOCKS + place).to(tl.int64))
