"""Sampling among the tokens that pass top-k, top-p and min-p, without sorting or waiting.

In the order of falling logits, then rising ids, the tokens that pass top-k and top-p are the first
few. So two numbers say which: the *border*, the logit of the last one, and how many tokens of just
that logit pass (its *ties*). The border is found digit by digit, four bits a launch, in logits
mapped to integers of the same order: a launch counts the tokens at or above each of 15 candidates
(top-k) or adds up their probabilities (top-p), block by block, and the next one adds the blocks up,
chooses the digit, and goes on below it. bfloat16 takes 4 launches a filter, float16 5, float32 8;
programs of rows that do not use a filter return at once. Sums are in a fixed order, so a row's
token depends on no other row. min-p is a comparison with the largest logit at the end.

All quantities are per row. Probabilities are in units of the likeliest token's.
Compiled per dtype of the logits and size of the vocabulary.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernel.triton.dispatch import dispatched
from minisgl.kernel.triton.launch import OVERLAP, factors, wait_for_inputs
from minisgl.kernel.triton.sampling import (
    BLOCK,
    NUM_WARPS,
    Draws,
    draw_blocks_kernel,
    load_logits,
    ordered,
    scale_of,
)

_SPAN, _SPAN_WARPS = 8 * BLOCK, 8
"""Tokens that a program of the search looks at."""

_USED_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""Leading bits of a float32 in which the values of a dtype differ, in whole digits."""

_DIGIT = tl.constexpr(4)
_LANES = tl.constexpr(16)
_LOWEST = tl.constexpr(-(2**31))


def sample_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return the next tokens; see ``SampleFiltered``.

    Of equal logits at a border those with the lowest ids pass, as in the reference. Probabilities
    are added up in float32 in another order: a token whose predecessors add up to top_p but for
    rounding may pass in one and not in the other.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    draws, search = Draws(logits), _Search(logits)
    row = (logits, *factors(logits.stride(0)), temperature, top_k, top_p)
    sizes = (vocab, search.spans, search.spans_power, search.digits, search.unused_bits, _SPAN)
    grid, how = (rows, search.spans), {"num_warps": _SPAN_WARPS, "launch_pdl": OVERLAP}
    _maxima_kernel[grid](*row[:4], search.maxima, *sizes[:2], _SPAN, **how)
    for step in range(2 * search.digits):
        by_mass = step >= search.digits
        _digit_kernel[grid](*row, *search.state, rows, step, by_mass, *sizes, **how)
    outcome = (search.row_max, search.border, search.ties, search.tied)
    _border_kernel[grid](*row, *search.state, rows, *outcome, BLOCK, *sizes, **how)
    draw_blocks_kernel[(rows, draws.blocks)](
        logits, temperature, min_p, *outcome,
        seed, positions, draws.largest, draws.scores, draws.tokens, *factors(logits.stride(0)),
        vocab, draws.blocks, triton.next_power_of_2(draws.blocks), search.unused_bits, True, BLOCK,
        num_warps=NUM_WARPS, launch_pdl=OVERLAP,
    )  # fmt: skip
    return draws.pick(temperature)


class _Search:
    """What the launches of a search leave for the next ones.

    What a launch leaves is read by all programs of the next, and written by one of them: it
    alternates between two places, by the parity of the step.

    Attributes:
        spans, spans_power: programs a row, and the power of two that holds them.
        digits: launches a filter.
        unused_bits: trailing bits of a float32 in which the logits do not differ.
        maxima: float32 ``[rows, spans]``: largest logits.
        state: the tensors above, and

            - partials, float32 ``[2, rows, spans, 16]``: counts or probabilities of each candidate;
            - bases, int32 ``[2, rows]``: digits of the border so far;
            - above, float32 ``[2, rows]``: count or probability of what is above all candidates;
            - k_border, int32 ``[rows]``, and k_ties, float32 ``[rows]``: what top-k found.
        row_max: float32 ``[rows]``: the largest logit.
        border: int32 ``[rows]``: of the logits that pass; the lowest integer if all do.
        ties: int32 ``[rows]``: how many tokens at the border pass.
        tied: int32 ``[rows, blocks]``: tokens at the border in each block of the draw.
    """

    __slots__ = (
        "border", "digits", "maxima", "row_max", "spans", "spans_power", "state", "tied", "ties",
        "unused_bits",
    )  # fmt: skip

    def __init__(self, logits: torch.Tensor) -> None:
        rows, vocab = logits.shape
        self.spans = -(-vocab // _SPAN)
        self.spans_power = triton.next_power_of_2(self.spans)
        self.unused_bits = 32 - _USED_BITS[logits.dtype]
        self.digits = _USED_BITS[logits.dtype] // 4

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=logits.device)

        def integers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=logits.device)

        self.maxima = floats(rows, self.spans)
        self.state = (
            self.maxima, floats(2, rows, self.spans, 16), integers(2, rows), floats(2, rows),
            integers(rows), floats(rows),
        )  # fmt: skip
        self.row_max, self.border = floats(rows), integers(rows)
        self.ties, self.tied = integers(rows), integers(rows, -(-vocab // BLOCK))


_UNSPECIALIZED = ["row_stride", "temperature_ptr", "top_k_ptr", "top_p_ptr", "num_rows", "step"]


@dispatched
@triton.jit(do_not_specialize=_UNSPECIALIZED[:2])
def _maxima_kernel(
    logits_ptr, row_stride, FACTOR: tl.constexpr, temperature_ptr, maxima_ptr,
    VOCAB: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The largest logit of a span."""
    wait_for_inputs()
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(temperature_ptr + row) > 0.0:
        columns = span * SPAN + tl.arange(0, SPAN)
        x = load_logits(logits_ptr + row * row_stride * FACTOR, columns, VOCAB)
        tl.store(maxima_ptr + row * SPANS + span, tl.max(x, axis=0))


@dispatched
@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _digit_kernel(
    logits_ptr, row_stride, FACTOR: tl.constexpr, temperature_ptr, top_k_ptr, top_p_ptr,
    maxima_ptr, partials_ptr, bases_ptr, above_ptr, k_border_ptr, k_ties_ptr, num_rows, step,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr, SPANS: tl.constexpr, SPANS_POWER: tl.constexpr,
    DIGITS: tl.constexpr, UNUSED_BITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One digit of the border: what is at or above each candidate, in one span."""
    wait_for_inputs()
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    by_count = (top_k > 0) & (top_k < VOCAB)
    if (temperature > 0.0) & ((top_p < 1.0) if BY_MASS else by_count):
        scale = scale_of(temperature)
        if BY_MASS:
            row_max = _row_max(maxima_ptr + row * SPANS, SPANS, SPANS_POWER)
            k_border, k_ties = _found_by_count(
                partials_ptr, bases_ptr, above_ptr, k_border_ptr, k_ties_ptr, row, num_rows,
                top_k, by_count, step > DIGITS, SPANS, SPANS_POWER, DIGITS, UNUSED_BITS,
            )  # fmt: skip
            base, above, _ = _found_by_mass(
                partials_ptr, bases_ptr, above_ptr, row, num_rows, step, top_p, row_max, scale,
                k_border, k_ties, SPANS, SPANS_POWER, DIGITS, UNUSED_BITS,
            )  # fmt: skip
        else:
            base, above = _counted(
                partials_ptr, bases_ptr, above_ptr, row, num_rows, step, top_k,
                SPANS, SPANS_POWER, DIGITS, UNUSED_BITS,
            )  # fmt: skip
        place = (step & 1) * num_rows + row
        if span == 0:
            tl.store(bases_ptr + place, base)
            tl.store(above_ptr + place, above)
            if BY_MASS:
                tl.store(k_border_ptr + row, k_border)
                tl.store(k_ties_ptr + row, k_ties)
        columns = span * SPAN + tl.arange(0, SPAN)
        x = load_logits(logits_ptr + row * row_stride * FACTOR, columns, VOCAB)
        keys = ordered(x) >> UNUSED_BITS
        inside = columns < VOCAB
        out_ptr = partials_ptr + (place * SPANS + span) * _LANES
        shift = _shift(step, DIGITS)
        if BY_MASS:
            amount = _probability(x, row_max, scale)
            tl.store(out_ptr, tl.sum(tl.where(keys > k_border, amount, 0.0), axis=0))
        else:
            amount = tl.where(inside, 1.0, 0.0)
            tl.store(out_ptr, 0.0)
        for lane in tl.static_range(1, 16):
            reached = keys >= base + (tl.full((), lane, tl.int32) << shift)
            tl.store(out_ptr + lane, tl.sum(tl.where(reached, amount, 0.0), axis=0))


@dispatched
@triton.jit(do_not_specialize=_UNSPECIALIZED[:-1])
def _border_kernel(
    logits_ptr, row_stride, FACTOR: tl.constexpr, temperature_ptr, top_k_ptr, top_p_ptr,
    maxima_ptr, partials_ptr, bases_ptr, above_ptr, k_border_ptr, k_ties_ptr, num_rows,
    row_max_ptr, border_ptr, ties_ptr, tied_ptr,
    BLOCK: tl.constexpr, VOCAB: tl.constexpr, SPANS: tl.constexpr, SPANS_POWER: tl.constexpr,
    DIGITS: tl.constexpr, UNUSED_BITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Border and ties of both filters together, and where in a span the border's tokens are."""
    wait_for_inputs()
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        by_count = (top_k > 0) & (top_k < VOCAB)
        row_max = _row_max(maxima_ptr + row * SPANS, SPANS, SPANS_POWER)
        border, ties = _found_by_count(
            partials_ptr, bases_ptr, above_ptr, k_border_ptr, k_ties_ptr, row, num_rows,
            top_k, by_count, top_p < 1.0, SPANS, SPANS_POWER, DIGITS, UNUSED_BITS,
        )  # fmt: skip
        if top_p < 1.0:
            scale = scale_of(temperature)
            k_border, k_ties = border, ties
            border, above, goal = _found_by_mass(
                partials_ptr, bases_ptr, above_ptr, row, num_rows, 2 * DIGITS, top_p, row_max,
                scale, k_border, k_ties, SPANS, SPANS_POWER, DIGITS, UNUSED_BITS,
            )  # fmt: skip
            each = _probability(_value(border, UNUSED_BITS), row_max, scale)
            ties = tl.minimum(tl.ceil((goal - above) / tl.maximum(each, 1e-37)), VOCAB * 1.0)
            ties = tl.where(border == k_border, tl.minimum(ties, k_ties), ties)
        if span == 0:
            tl.store(row_max_ptr + row, row_max)
            tl.store(border_ptr + row, border)
            tl.store(ties_ptr + row, ties.to(tl.int32))
        if by_count | (top_p < 1.0):
            parts: tl.constexpr = SPAN // BLOCK
            part = tl.arange(0, parts)
            columns = span * SPAN + part[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            x = load_logits(logits_ptr + row * row_stride * FACTOR, columns, VOCAB)
            tied = ((ordered(x) >> UNUSED_BITS) == border) & (columns < VOCAB)
            block, blocks = span * parts + part, (VOCAB + BLOCK - 1) // BLOCK
            counts = tl.sum(tied.to(tl.int32), axis=1)
            tl.store(tied_ptr + row * blocks + block, counts, mask=block < blocks)


@triton.jit
def _found_by_count(
    partials_ptr, bases_ptr, above_ptr, k_border_ptr, k_ties_ptr, row, num_rows,
    top_k, by_count, is_known,
    SPANS: tl.constexpr, SPANS_POWER: tl.constexpr, DIGITS: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Return the border of top-k and its ties (float32); the lowest integer and 0 without one."""
    border, ties = _lowest(UNUSED_BITS), tl.full((), 0.0, tl.float32)
    if by_count:
        if is_known:
            border, ties = tl.load(k_border_ptr + row), tl.load(k_ties_ptr + row)
        else:
            border, above = _counted(
                partials_ptr, bases_ptr, above_ptr, row, num_rows, DIGITS, top_k,
                SPANS, SPANS_POWER, DIGITS, UNUSED_BITS,
            )  # fmt: skip
            ties = top_k.to(tl.float32) - above
    return border, ties


@triton.jit
def _counted(
    partials_ptr, bases_ptr, above_ptr, row, num_rows, step, top_k,
    SPANS: tl.constexpr, SPANS_POWER: tl.constexpr, DIGITS: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Return the digits that the steps before ``step`` of top-k found, and the count above."""
    base, above = _lowest(UNUSED_BITS), tl.full((), 0.0, tl.float32)
    if step > 0:
        place = ((step - 1) & 1) * num_rows + row
        base, above = tl.load(bases_ptr + place), tl.load(above_ptr + place)
        sums = _sums(partials_ptr + place * SPANS * _LANES, SPANS, SPANS_POWER)
        shift = _shift(step - 1, DIGITS)
        base, above = _narrowed(sums, base, above, top_k.to(tl.float32), shift)
    return base, above


@triton.jit
def _found_by_mass(
    partials_ptr, bases_ptr, above_ptr, row, num_rows, step, top_p, row_max, scale,
    k_border, k_ties,
    SPANS: tl.constexpr, SPANS_POWER: tl.constexpr, DIGITS: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Return the digits that the steps before ``step`` of top-p found, what is above, the goal."""
    zero = tl.full((), 0.0, tl.float32)
    base, above, goal = _lowest(UNUSED_BITS), zero, zero
    if step > DIGITS:
        place = ((step - 1) & 1) * num_rows + row
        base, above = tl.load(bases_ptr + place), tl.load(above_ptr + place)
        sums = _sums(partials_ptr + place * SPANS * _LANES, SPANS, SPANS_POWER)
        shift = _shift(step - 1, DIGITS)
        lanes = tl.arange(0, _LANES)
        # All that passes top-k: what is above its border, which lane 0 has, and the ties.
        total = tl.sum(tl.where(lanes == 0, sums, 0.0), axis=0)
        if k_ties > 0.0:
            total += k_ties * _probability(_value(k_border, UNUSED_BITS), row_max, scale)
        # The likeliest token alone has 1, so that it passes even with top_p 0.
        goal = tl.maximum(top_p * total, 1e-6)
        sums = tl.where(base + (lanes << shift) > k_border, sums, total)
        base, above = _narrowed(sums, base, above, goal, shift)
    return base, above, goal


@triton.jit
def _narrowed(sums, base, above, goal, shift):
    """Return the highest candidate that reaches the goal, and the sum above its successor."""
    lanes = tl.arange(0, _LANES)
    digit = tl.sum(((lanes > 0) & (sums >= goal)).to(tl.int32), axis=0)
    following = tl.sum(tl.where(lanes == digit + 1, sums, 0.0), axis=0)
    return base + (digit << shift), tl.where(digit < _LANES - 1, following, above)


@triton.jit
def _sums(partials_ptr, SPANS: tl.constexpr, SPANS_POWER: tl.constexpr):
    """Add up the spans of one row, float32 ``[16]``."""
    spans, lanes = tl.arange(0, SPANS_POWER)[:, None], tl.arange(0, _LANES)[None, :]
    partials = tl.load(partials_ptr + spans * _LANES + lanes, mask=spans < SPANS, other=0.0)
    return tl.sum(partials, axis=0)


@triton.jit
def _row_max(maxima_ptr, SPANS: tl.constexpr, SPANS_POWER: tl.constexpr):
    """Return the largest logit of a row; 0 if there is none."""
    spans = tl.arange(0, SPANS_POWER)
    maxima = tl.load(maxima_ptr + spans, mask=spans < SPANS, other=float("-inf"))
    largest = tl.max(maxima, axis=0)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _probability(x, row_max, scale):
    return tl.exp2((x - row_max) * scale)


@triton.jit
def _value(key, UNUSED_BITS: tl.constexpr):
    """Return the logit of a key: negative ones have their unused bits set."""
    key = (key << UNUSED_BITS) | tl.where(key < 0, (1 << UNUSED_BITS) - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _lowest(UNUSED_BITS: tl.constexpr):
    """Return a key below that of every number."""
    return tl.full((), _LOWEST, tl.int32) >> UNUSED_BITS


@triton.jit
def _shift(step, DIGITS: tl.constexpr):
    """Return by how many bits a candidate's digit is shifted at a step."""
    return _DIGIT * (DIGITS - 1 - step % DIGITS)
