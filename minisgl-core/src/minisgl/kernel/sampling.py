"""Torch references of sampling: argmax, or Gumbel-max over filtered logits with keyed noise.

The noise of a token is a hash of (seed, position, token id): a request with a seed draws the same
noise in any batch, at any row, on any rank, and nothing has to be remembered between steps.

Nothing here waits for a GPU: what would shorten the work is looked up only where that is free.
"""

import torch

_CANDIDATES = 1024
"""Filters look at this many likeliest tokens first; few requests need the whole vocabulary."""

_GOLDEN = -1640531527  # 0x9E3779B9 as a signed 32-bit number


def sample_gumbel(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the next tokens, int64 ``[S]``; see ``SampleGumbel``."""
    greedy = logits.argmax(dim=-1)
    is_greedy = temperature == 0
    if is_true(is_greedy.all()):
        return greedy
    noise = gumbel_noise(seed, positions, torch.arange(logits.shape[-1], device=logits.device))
    drawn = (_scaled(logits, temperature) + noise).argmax(dim=-1)
    return torch.where(is_greedy, greedy, drawn)


def sample_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return the next tokens, int64 ``[S]``; see ``SampleFiltered``.

    Of equal logits at the border of a filter those with the lowest ids pass.
    """
    params = (temperature, top_k, top_p, min_p, seed, positions)
    filters = ((top_k > 0) | (top_p < 1) | (min_p > 0)) & (temperature > 0)
    if is_true(filters.all()):
        return _draw_filtered(logits, *params)
    tokens = sample_gumbel(logits, temperature, seed, positions)
    if logits.is_cuda:
        return torch.where(filters, _draw_filtered(logits, *params), tokens)
    rows = filters.nonzero().squeeze(-1)
    if len(rows):
        tokens[rows] = _draw_filtered(logits[rows], *(param[rows] for param in params))
    return tokens


def gumbel_noise(seed: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 ``[S, n]``, keyed by (seed, position, token id).

    Args:
        seed: int64 ``[S]``.
        positions: int64 ``[S]``.
        tokens: int64 ``[n]`` or ``[S, n]``.
    """
    return gumbel_of_bits(noise_bits(seed, positions, tokens))


def noise_bits(seed: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return random bits, int32 ``[S, n]``, of which the upper 23 are good; see ``gumbel_noise``.

    The second half is a finaliser found by search (hash-prospector, Wellons: 16 21f0aaad 15
    d35a2d97), without its last shift, which only betters the lower bits.
    """
    low, high = _row_keys(seed, positions)
    x = tokens.to(torch.int32) * _GOLDEN + low.unsqueeze(-1)
    x = (x ^ ((x >> 16) & 0xFFFF) ^ high.unsqueeze(-1)) * 0x21F0AAAD
    return (x ^ ((x >> 15) & 0x1FFFF)) * -749064809  # 0xD35A2D97


def gumbel_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return the Gumbel noise, float32, that 32 random bits (int32) stand for.

    The upper 23 are used, centred between 0 and 1: with one more, the largest would round to 1.
    Small numbers are large noise: winners come from where floating point is finest.
    """
    uniform = (((bits >> 9) & 0x7FFFFF).float() + 0.5) * (1.0 / 2**23)
    return -torch.log(-torch.log1p(-uniform))


def filter_mask(
    values: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    log_total: torch.Tensor,
) -> torch.Tensor:
    """Return which of the candidates pass the filters, bool ``[S, n]``.

    top_k first, then top_p among what is left, then min_p against the likeliest token.

    Args:
        values: ``[S, n]``: the likeliest tokens' scaled logits, descending.
        top_k: ``[S]``, see ``SampleFiltered``.
        top_p: ``[S]``.
        min_p: ``[S]``.
        log_total: ``[S]``: log of the sum of exponentials over the whole vocabulary.
    """
    n = values.shape[-1]
    rank = torch.arange(n, device=values.device)
    most = torch.where(top_k > 0, top_k, torch.full_like(top_k, n))
    passes = rank < most.unsqueeze(-1)
    among = values.masked_fill(~passes, float("-inf"))
    log_total = torch.where(top_k > 0, among.logsumexp(dim=-1), log_total)
    probs = (among - log_total.unsqueeze(-1)).exp()
    before = probs.cumsum(dim=-1) - probs
    passes &= (before < top_p.unsqueeze(-1)) | (rank == 0)
    return passes & (probs >= min_p.unsqueeze(-1) * probs[:, :1])


def _draw_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    scaled = _scaled(logits, temperature)
    log_total = scaled.logsumexp(dim=-1)
    values, tokens = likeliest(scaled, min(scaled.shape[-1], _CANDIDATES))
    passes = filter_mask(values, top_k, top_p, min_p, log_total)
    if not is_true(_complete(values, passes, top_k).all()):
        values, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        passes = filter_mask(values, top_k, top_p, min_p, log_total)
    noise = gumbel_noise(seed, positions, tokens)
    place = (values + noise).masked_fill_(~passes, float("-inf")).argmax(dim=-1)
    return tokens.gather(-1, place.unsqueeze(-1)).squeeze(-1)


def likeliest(scaled: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``num`` largest of each row and their ids, falling, equal ones by id.

    Which of several that equal the last one are among them is anybody's guess.
    """
    values, tokens = scaled.topk(num, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, order)


def _complete(values: torch.Tensor, passes: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return, bool ``[S]``, whether the candidates hold every token that passes.

    If the least of them that passes equals the last candidate, more such tokens may follow.
    """
    least = values.masked_fill(~passes, float("inf")).amin(dim=-1)
    return (top_k <= values.shape[-1]) & (least > values[:, -1])


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return logits over temperature, float32, the largest 0; greedy rows as if it were 1."""
    # Divided after the largest is taken off, so that a tiny temperature cannot overflow.
    scaled = logits.float()
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    return scaled.div_(temperature.masked_fill(temperature == 0, 1.0).unsqueeze(-1))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Finalise a 32-bit hash (MurmurHash3, Appleby); int32 products wrap around."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -2048144789
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


def _row_keys(seed: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hash (seed, position) into two int32 keys a row."""
    low, high = (seed & 0xFFFFFFFF).to(torch.int32), (seed >> 32).to(torch.int32)
    place = positions.to(torch.int32)
    first = _mix(low ^ _mix(place * _GOLDEN + high))
    return first, _mix(first * _GOLDEN + (high ^ place))


def is_true(value: torch.Tensor) -> bool:
    """Read a bool from the CPU; on a GPU that would wait for it, and the answer is no."""
    return not value.is_cuda and bool(value)
