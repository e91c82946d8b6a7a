"""The core's exchanges: every token's sum over the ranks, whoever has which experts."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.moe.collective_exchanges import AllReduceExchange, AllToAllExchange
from minisgl.moe.exchange import ExchangeContext
from minisgl.moe.placement import ExpertPlacement
from minisgl.testing.communicators import run_ranks

HIDDEN, TOP_K = 3, 2
Case = tuple[ExpertPlacement, int, bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A placement, a number of tokens, and whether there is something else to add."""
    groups, ranks_per_group = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    experts = groups * draw(st.integers(1, 3))
    placement = ExpertPlacement(experts, groups * ranks_per_group, groups)
    return placement, draw(st.integers(1, 12)), draw(st.booleans())


def addend(hidden: torch.Tensor, expert: int, part: int) -> torch.Tensor:
    """What one rank adds for one of its experts: whole numbers, so that sums are exact."""
    return hidden * (expert + 1) + part


@pytest.mark.parametrize("exchange", [AllReduceExchange, AllToAllExchange])
@example(case=(ExpertPlacement(4, 4, 4), 1, False), seed=0)  # most ranks have no token of their own
@given(case=cases(), seed=st.integers(0, 999))
def test_each_token_gets_the_sum_over_its_experts(exchange: type, case: Case, seed: int) -> None:
    """Catches: a token run twice, results sent to another rank or added to another token."""
    placement, num_tokens, with_partial = case
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-9, 9, (num_tokens, HIDDEN), generator=generator).float()
    experts = torch.randint(
        -1, placement.num_experts, (num_tokens, TOP_K), generator=generator, dtype=torch.int32
    )
    weights = torch.randint(1, 4, (num_tokens, TOP_K), generator=generator).float()
    partial = torch.randint(-9, 9, (num_tokens, HIDDEN), generator=generator).float()

    expected = partial * placement.num_ranks if with_partial else torch.zeros_like(hidden)
    for token, place in torch.cartesian_prod(torch.arange(num_tokens), torch.arange(TOP_K)):
        expert = int(experts[token, place])
        if expert >= 0:
            for part in range(placement.ranks_per_group):
                expected[token] += weights[token, place] * addend(hidden[token], expert, part)

    def work(communicator):
        rank = communicator.rank
        context = ExchangeContext(
            communicator=communicator,
            placement=placement,
            device=torch.device("cpu"),
            dtype=torch.float32,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            max_num_tokens=16,
        )
        one = exchange(context)
        tokens = one.dispatch(hidden.clone(), weights.clone(), experts.clone())
        out = torch.zeros_like(tokens.hidden)
        for row, (x, w, chosen) in enumerate(
            zip(tokens.hidden, tokens.weights, tokens.experts, strict=True)
        ):
            for weight, expert in zip(w, chosen.tolist(), strict=True):
                if expert in placement.experts_of(rank):
                    out[row] += weight * addend(x, expert, placement.part_of(rank))
        return one.combine(out, tokens, partial.clone() if with_partial else None)

    for combined in run_ranks(placement.num_ranks, work):
        assert torch.equal(combined, expected)


def test_all_to_all_runs_no_token_without_an_expert_here() -> None:
    placement = ExpertPlacement(4, 2, 2)
    experts = torch.tensor([[0, 1], [2, 3], [1, 2], [-1, -1]], dtype=torch.int32)

    def work(communicator):
        context = ExchangeContext(
            communicator=communicator,
            placement=placement,
            device=torch.device("cpu"),
            dtype=torch.float32,
            top_k=2,
            hidden_size=1,
            max_num_tokens=4,
        )
        hidden = torch.arange(4.0).unsqueeze(1)
        return AllToAllExchange(context).dispatch(hidden, torch.ones(4, 2), experts).hidden

    first, second = run_ranks(2, work)
    assert (first.flatten().tolist(), second.flatten().tolist()) == ([0.0, 2.0], [1.0, 2.0])


def test_placement_gives_neighbours_the_same_experts() -> None:
    placement = ExpertPlacement(num_experts=6, num_ranks=4, num_groups=2)
    held = [placement.experts_of(rank) for rank in range(4)]
    assert held == [range(3), range(3), range(3, 6), range(3, 6)]
    assert [placement.part_of(rank) for rank in range(4)] == [0, 1, 0, 1]
