"""From logits to tokens: argmax, or Gumbel-max over filtered logits with keyed noise.

The noise of a token is a hash of (seed, position, token id): a request with a seed draws the same
noise in any batch, at any row, on any rank, and nothing has to be remembered between steps.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_CANDIDATES = 1024
"""Filters look at this many likeliest tokens first; few requests need the whole vocabulary."""

_GOLDEN = -1640531527  # 0x9E3779B9 as a signed 32-bit number


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Parameters of the sampled rows of one launch, each ``[S]`` on the logits' device.

    Attributes:
        temperature: float32; 0 is greedy.
        top_k: int64; 0 is all.
        top_p, min_p: float32; 1 and 0 filter nothing.
        seed: int64.
        positions: int64: place of the token to come in its sequence.
        all_greedy: every row is greedy.
        filtered: bool, on the host: rows that use top_k, top_p or min_p.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    positions: torch.Tensor
    all_greedy: bool
    filtered: npt.NDArray[np.bool_]


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Return the next tokens, int64 ``[S]``, for logits ``[S, vocab]``.

    Greedy rows are the argmax (the lowest token id among equals) whatever the other rows do.
    """
    greedy = logits.argmax(dim=-1)
    if params.all_greedy:
        return greedy
    is_greedy = params.temperature == 0
    # Divided after the largest is taken off, so that a tiny temperature cannot overflow.
    scaled = logits.float()
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    scaled /= params.temperature.masked_fill(is_greedy, 1.0).unsqueeze(-1)
    if params.filtered.all():
        drawn = _sample_filtered(scaled, params)
    else:
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        drawn = (scaled + gumbel_noise(params.seed, params.positions, tokens)).argmax(dim=-1)
        if params.filtered.any():
            rows = torch.from_numpy(params.filtered.nonzero()[0]).to(logits.device)
            drawn[rows] = _sample_filtered(scaled[rows], _select(params, rows))
    return torch.where(is_greedy, greedy, drawn)


def gumbel_noise(seed: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 ``[S, n]``, keyed by (seed, position, token id).

    Args:
        seed: int64 ``[S]``.
        positions: int64 ``[S]``.
        tokens: int64 ``[n]`` or ``[S, n]``.
    """
    low, high = _row_keys(seed, positions)
    state = tokens.to(torch.int32) * _GOLDEN + low.unsqueeze(-1)
    state = _mix(_mix(state) ^ high.unsqueeze(-1))
    # 24 random bits, centred between the ends, so that neither logarithm sees 0.
    uniform = (((state >> 8) & 0xFFFFFF).float() + 0.5) * (1.0 / 2**24)
    return -torch.log(-torch.log(uniform))


def filter_mask(
    values: torch.Tensor, params: SamplingTensors, log_total: torch.Tensor
) -> torch.Tensor:
    """Return which of the candidates pass the filters, bool ``[S, n]``.

    top_k first, then top_p among what is left, then min_p against the likeliest token.

    Args:
        values: ``[S, n]``: the likeliest tokens' scaled logits, descending.
        params: the rows' parameters.
        log_total: ``[S]``: log of the sum of exponentials over the whole vocabulary.
    """
    n = values.shape[-1]
    rank = torch.arange(n, device=values.device)
    top_k = torch.where(params.top_k > 0, params.top_k, torch.full_like(params.top_k, n))
    passes = rank < top_k.unsqueeze(-1)
    among = values.masked_fill(~passes, float("-inf"))
    log_total = torch.where(params.top_k > 0, among.logsumexp(dim=-1), log_total)
    probs = (among - log_total.unsqueeze(-1)).exp()
    before = probs.cumsum(dim=-1) - probs
    passes &= (before < params.top_p.unsqueeze(-1)) | (rank == 0)
    return passes & (probs >= params.min_p.unsqueeze(-1) * probs[:, :1])


def _sample_filtered(scaled: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    vocab = scaled.shape[-1]
    num = min(vocab, _CANDIDATES)
    log_total = scaled.logsumexp(dim=-1)
    values, tokens = scaled.topk(num, dim=-1)
    if num < vocab and not _enough(values, params, log_total):
        values, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    kept = values.masked_fill(~filter_mask(values, params, log_total), float("-inf"))
    place = (kept + gumbel_noise(params.seed, params.positions, tokens)).argmax(dim=-1)
    return tokens.gather(-1, place.unsqueeze(-1)).squeeze(-1)


def _enough(values: torch.Tensor, params: SamplingTensors, log_total: torch.Tensor) -> bool:
    """Whether the candidates surely hold everything that each row's filters let through."""
    by_top_k = (params.top_k > 0) & (params.top_k <= values.shape[-1])
    by_top_p = (values.logsumexp(dim=-1) - log_total).exp() * 0.999999 >= params.top_p
    by_min_p = (values[:, -1] - values[:, 0]).exp() < params.min_p
    enough = by_top_k | ((params.top_k == 0) & (by_top_p | by_min_p))
    return bool((enough | (params.temperature == 0)).all())


def _select(params: SamplingTensors, rows: torch.Tensor) -> SamplingTensors:
    return SamplingTensors(
        temperature=params.temperature[rows],
        top_k=params.top_k[rows],
        top_p=params.top_p[rows],
        min_p=params.min_p[rows],
        seed=params.seed[rows],
        positions=params.positions[rows],
        all_greedy=params.all_greedy,
        filtered=params.filtered,
    )


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
