"""Sampling laws (DESIGN section 7, invariant 18)."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.engine import sampler
from minisgl.engine.sampler import SamplingTensors
from minisgl.kernel.ops import OpTable
from minisgl.kernel.sampling import gumbel_noise, gumbel_of_bits

OPS = OpTable()


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    return sampler.sample(logits, params, OPS)


def rows(params: list[dict[str, Any]]) -> SamplingTensors:
    """Parameters of some rows, by name; what is left out is neutral."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in params], dtype=dtype)

    filtered = [
        row.get("top_k", 0) > 0 or row.get("top_p", 1) < 1 or row.get("min_p", 0) > 0
        for row in params
    ]
    temperature = column("temperature", 1.0, torch.float32)
    return SamplingTensors(
        temperature=temperature,
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=column("seed", 0, torch.int64),
        positions=column("position", 0, torch.int64),
        all_greedy=bool((temperature == 0).all()),
        filtered=np.array(filtered),
    )


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, 2000]),
        "top_p": st.sampled_from([0.05, 0.5, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.9]),
        "seed": st.integers(0, 2**63 - 1),
        "position": st.integers(0, 100_000),
    }
)


def allowed(logits: torch.Tensor, params: dict[str, Any]) -> set[int]:
    """The tokens that the filters let through, spelt out in float64 for one row."""
    scaled = logits.double() / params["temperature"]
    probs = scaled.softmax(-1)
    order = probs.argsort(descending=True, stable=True)
    if params["top_k"] > 0:
        order = order[: params["top_k"]]
    probs = probs[order] / probs[order].sum()
    before = probs.cumsum(0) - probs
    # A little slack where float32 may decide a border the other way.
    keep = (before < params["top_p"] + 1e-5) & (probs >= params["min_p"] * probs[0] * (1 - 1e-5))
    return set(order[keep].tolist())


BATCHES = st.lists(PARAMS, min_size=1, max_size=5)
VOCABS = st.sampled_from([5, 300, 1500])


def sampled(temperature: float = 1.0, **filters: Any) -> dict[str, Any]:
    """A row without filters but for those named."""
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
    return {"temperature": temperature, **plain, **filters}


def logits_for(params: list[dict[str, Any]], vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed)) * 4


@example([sampled(0.3, top_p=0.05), sampled(0.0)], 5, 0)
@given(BATCHES, VOCABS, st.integers(0, 9))
def test_invariant_18_greedy_is_argmax_in_any_batch_and_so_is_top_k_1(
    params: list[dict[str, Any]], vocab: int, seed: int
) -> None:
    """Catches: greedy rows that get noise or filters because a neighbour is sampled."""
    logits = logits_for(params, vocab, seed)
    before = logits.clone()
    tokens = sample(logits, rows(params)).tolist()
    assert torch.equal(before, logits), "the logits are left alone"
    for row, (token, one) in enumerate(zip(tokens, params, strict=True)):
        if one["temperature"] == 0 or one["top_k"] == 1:
            assert token == int(logits[row].argmax())


@example([sampled(2.5, top_p=0.05, seed=3)], 5, 0)
@given(BATCHES, VOCABS, st.integers(0, 9))
def test_invariant_18_samples_lie_in_the_filtered_set(
    params: list[dict[str, Any]], vocab: int, seed: int
) -> None:
    """Catches: a filter that lets one token too many through, or none; a filter on wrong rows."""
    logits = logits_for(params, vocab, seed)
    for row, token in enumerate(sample(logits, rows(params)).tolist()):
        if params[row]["temperature"] > 0:
            assert token in allowed(logits[row], params[row])


@example([sampled(0.0), sampled()], 5, 0)
@given(BATCHES, VOCABS, st.integers(0, 9))
def test_invariant_18_a_seeded_row_draws_the_same_noise_in_any_batch(
    params: list[dict[str, Any]], vocab: int, seed: int
) -> None:
    """Catches: noise that depends on the row, on the batch's size, or on neighbours' filters."""
    logits = logits_for(params, vocab, seed)
    tokens = sample(logits, rows(params)).tolist()
    for row, one in enumerate(params):
        assert sample(logits[row : row + 1], rows([one])).tolist() == [tokens[row]]
    backwards = sample(logits.flip(0), rows(params[::-1])).tolist()
    assert backwards == tokens[::-1]


def test_greedy_takes_the_lowest_id_among_equals_beside_any_neighbour() -> None:
    logits = torch.zeros(2, 9)
    logits[:, [3, 5]] = 1.0
    tokens = sample(logits, rows([{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}]))
    assert tokens[0] == 3


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.999999}, {"min_p": 1e-6}])
def test_frequencies_follow_the_softmax(filters: dict[str, Any]) -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    num = 20_000
    params = rows([{"seed": 7, "position": position, **filters} for position in range(num)])
    tokens = sample(probs.log().expand(num, 4), params)
    counts = torch.bincount(tokens, minlength=4) / num
    # Four standard deviations of the largest count.
    torch.testing.assert_close(counts, probs, atol=4 * (0.25 / num) ** 0.5, rtol=0)


def test_temperature_sharpens_and_a_tiny_one_is_greedy() -> None:
    logits = torch.tensor([1000.0, 0.0, 999.0]).expand(50, 3)
    tokens = sample(logits, rows([{"temperature": 1e-6, "seed": n} for n in range(50)]))
    assert tokens.eq(0).all()


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([3, 3, 4, 2**40 + 3]), torch.tensor([1, 2, 1, 1])
    noise = gumbel_noise(seeds, positions, torch.arange(64))
    assert len({tuple(row) for row in noise.tolist()}) == 4, "each key has its own noise"
    some = torch.tensor([[9, 4]]).expand(4, 2)
    torch.testing.assert_close(gumbel_noise(seeds, positions, some), noise[:, [9, 4]])


def test_noise_is_gumbel_distributed_and_uncorrelated_between_neighbouring_keys() -> None:
    noise = gumbel_noise(torch.full((500,), 1), torch.arange(500), torch.arange(400))
    assert noise.mean().sub(0.5772).abs() < 0.02
    assert noise.std().sub(1.2825).abs() < 0.02
    assert torch.corrcoef(noise[:20]).fill_diagonal_(0).abs().max() < 0.25
    assert torch.corrcoef(noise[:, :20].T).fill_diagonal_(0).abs().max() < 0.25


def test_noise_is_finite_for_any_bits() -> None:
    """A token with infinite noise would win against any logit."""
    ends = torch.tensor([-1, 0, 1, 511, 512, 2**31 - 1, -(2**31), -512, -513], dtype=torch.int32)
    noise = gumbel_of_bits(ends)
    assert noise.isfinite().all()
    assert noise[1] == noise.max() > 16
    assert noise[0] == noise.min() < -2.7
    some = torch.randint(-(2**31), 2**31, (10_000,), dtype=torch.int64).int()
    order = (some >> 9 & 0x7FFFFF).argsort()
    assert (gumbel_of_bits(some[order]).diff() <= 0).all(), "smaller numbers, larger noise"


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 5}, [0, 1, 1700, 1800, 1900]), ({"top_p": 0.5}, [1700, 1800])],
)
def test_a_filter_keeps_the_lowest_ids_among_equals_at_its_border(
    filters: dict[str, Any], kept: list[int]
) -> None:
    logits = torch.zeros(2000)
    logits[[1700, 1800, 1900]] = 8.0
    drawn = sample(logits.expand(4000, 2000), rows([{"seed": n, **filters} for n in range(4000)]))
    assert set(drawn.tolist()) <= set(kept)
    assert {1700, 1800} <= set(drawn.tolist())
