"""Gumbel-max sampling over blocks of the vocabulary, straight from the logits.

Two launches: each program draws the best token of one block of one row, then one program a row
picks among its blocks. Blocks are of one size, so that a row's token depends on no other row.
Compiled per dtype of the logits and size of the vocabulary.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs

BLOCK, NUM_WARPS = 1024, 4
"""Tokens of a block: eight a thread."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Without a GPU there is no assembly either."""


def sample_gumbel(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the next tokens; see ``SampleGumbel``.

    The random bits are the reference's; its logarithms are approximated, so where two scores are
    within 1e-5 of each other the other token may win.
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
def gumbel_noise(seed, position, tokens):
    """Return the noise of a row's tokens (uint32), float32, but for a constant and a factor.

    Powers of two for the reference's powers of e: 1 / ln(2) times its noise, plus log2(ln(2)),
    within 1e-5.
    """
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    first = mix(low ^ mix(place * 0x9E3779B9 + high))
    second = mix(first * 0x9E3779B9 + (high ^ place))
    bits = mix(mix(tokens * 0x9E3779B9 + first) ^ second)
    # 23 random bits as the mantissa of a number in [1, 2); exact, like the reference's uniform.
    uniform = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - (1.0 - 2.0**-24)
    # -log2(1 - rest): a series where the logarithm would lose digits, which is where winners are.
    rest = 1.0 - uniform
    series = 0.28853900817779268 + rest * 0.24044917348149390
    series = 0.36067376022224085 + rest * series
    series = 0.48089834696298783 + rest * series
    series = 0.72134752044448170 + rest * series
    series = 1.44269504088896341 + rest * series
    return -log2(tl.where(rest < 0.04, rest * series, -log2(uniform)))


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
    """The best token of one block; with ``FILTERED`` among those that pass (see ``filters``)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs()
    row_ptr = logits_ptr + row * row_stride * FACTOR
    x = load_logits(row_ptr, columns, VOCAB)
    temperature = tl.load(temperature_ptr + row)
    scale = scale_of(temperature)
    largest = tl.max(x, axis=0)
    scores = (x - tl.where(largest == float("-inf"), 0.0, largest)) * scale
    if temperature > 0.0:
        if FILTERED:
            border = tl.load(border_ptr + row)
            # Most blocks have no token that passes: nothing of theirs needs noise.
            hopeful = (ordered(largest) >> UNUSED_BITS) >= border
            scores = tl.where(hopeful, scores, float("-inf"))
        else:
            hopeful = True
        if hopeful:
            seed, position = tl.load(seed_ptr + row), tl.load(positions_ptr + row)
            scores += gumbel_noise(seed, position, columns.to(tl.uint32))
            if FILTERED:
                likely = (x - tl.load(row_max_ptr + row)) * scale
                passes = likely >= tl.log2(tl.load(min_p_ptr + row))
                keys = ordered(x) >> UNUSED_BITS
                # Of the tokens at the border, the first few in the order of ids pass.
                ties, others = tl.load(ties_ptr + row), tl.arange(0, BLOCKS_POWER)
                tied = (keys == border).to(tl.int32)
                earlier = (others < block) & (ties > 0)
                before = tl.load(tied_ptr + row * BLOCKS + others, mask=earlier, other=0)
                rank = tl.sum(before, axis=0) + tl.cumsum(tied, axis=0)
                passes &= (keys > border) | ((tied > 0) & (rank <= ties))
                scores = tl.where(passes, scores, float("-inf"))
    best, place = tl.max(scores, axis=0, return_indices=True)
    out = row * BLOCKS + block
    tl.store(largest_ptr + out, largest)
    tl.store(score_ptr + out, best)
    tl.store(token_ptr + out, block * BLOCK + place)


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
