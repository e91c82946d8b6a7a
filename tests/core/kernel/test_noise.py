"""The bits that sampling's noise comes from: uniform, and unrelated between neighbouring keys.

Statistics of fixed keys, so that a test that passes always does; bounds are six deviations.
"""

import pytest
import torch

from minisgl.kernel.sampling import noise_bits

VOCAB = 151_936
NUM = 1 << 16
KEYS = [(0, 0), (0, 1), (1, 0), (2**40, 7), (-1, 4095), (0x5DEECE66D1234567, 100)]
"""Seeds and positions, and neighbours among them."""


def upper(seed: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The 23 bits that are used, of each row's token."""
    return (noise_bits(seed, positions, tokens.unsqueeze(-1)).squeeze(-1) >> 9) & 0x7FFFFF


def row(seed: int, position: int, num_tokens: int = VOCAB) -> torch.Tensor:
    """The bits of one row's tokens."""
    tokens = torch.arange(num_tokens)
    return upper(torch.full_like(tokens, seed), torch.full_like(tokens, position), tokens)


def deviations(values: torch.Tensor, num_values: int) -> float:
    """How far from equally frequent the values are, by chi-square, in standard deviations."""
    counts = torch.bincount(values, minlength=num_values).double()
    expected = len(values) / num_values
    chi_square = ((counts - expected).square() / expected).sum().item()
    return (chi_square - (num_values - 1)) / (2 * (num_values - 1)) ** 0.5


@pytest.mark.parametrize("shift", [0, 7, 13])
@pytest.mark.parametrize("key", KEYS)
def test_every_part_of_the_bits_is_uniform_over_the_vocabulary(
    key: tuple[int, int], shift: int
) -> None:
    assert abs(deviations((row(*key) >> shift) & 1023, 1024)) < 6


@pytest.mark.parametrize("shift", [0, 9, 18])
@pytest.mark.parametrize("distance", [1, 2, 3, 7, 8, 16, 32, 256, 1024, 65_536])
def test_tokens_at_any_distance_are_independent(distance: int, shift: int) -> None:
    for key in KEYS:
        part = (row(*key) >> shift) & 31
        assert abs(deviations(part[:-distance] * 32 + part[distance:], 1024)) < 6


@pytest.mark.parametrize("shift", [0, 9, 18])
@pytest.mark.parametrize("token", [0, 1, 77, VOCAB - 1])
def test_neighbouring_positions_and_neighbouring_seeds_are_independent(
    token: int, shift: int
) -> None:
    some, same = torch.arange(NUM), torch.full((NUM,), 9)
    for bits in (upper(same, some, same * 0 + token), upper(some, same, same * 0 + token)):
        part = (bits >> shift) & 31
        assert abs(deviations(part, 32)) < 6
        assert abs(deviations(part[:-1] * 32 + part[1:], 1024)) < 6


@pytest.mark.parametrize(("name", "num_bits"), [("seed", 64), ("position", 17), ("token", 18)])
def test_any_bit_of_a_key_flips_every_bit_half_of_the_time(name: str, num_bits: int) -> None:
    random = torch.Generator().manual_seed(3)
    keys = {"seed": 63, "position": 17, "token": 17}
    some = {key: torch.randint(0, 2**bits - 1, (NUM,), generator=random)
            for key, bits in keys.items()}  # fmt: skip
    before = upper(*some.values())
    for bit in range(num_bits):
        flip = -(2**63) if bit == 63 else 1 << bit
        flipped = before ^ upper(*{**some, name: some[name] ^ flip}.values())
        shares = torch.stack([((flipped >> at) & 1).double().mean() for at in range(23)])
        assert (shares - 0.5).abs().max() < 6 * 0.5 / NUM**0.5, f"bit {bit} of the {name}"


def test_the_least_of_many_is_as_likely_to_be_at_any_place_whatever_came_before() -> None:
    """What is drawn from equal logits, at one position and the next."""
    winners = torch.stack(
        [row(5, position, 256).argmin() for position in range(12_000)]
    )  # fmt: skip
    assert abs(deviations(winners, 256)) < 6
    assert abs(deviations((winners[1:] - winners[:-1]) % 256, 256)) < 6
