"""The core's exchanges: every token's sum over the ranks, whoever has which experts."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.moe.collective_exchanges import AllReduceExchange, AllToAllExchange
from minisgl.moe.exchange import ExchangeContext, ExpertExchange
from minisgl.moe.placement import ExpertPlacement
from minisgl.testing.communicators import run_ranks
from minisgl.testing.exchange_contract import ExpertExchangeContract

TOP_K: Final = 2


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Groups of one or two ranks, each with one expert or more; at least as many as ``TOP_K``."""
    groups, ranks_per_group = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    experts = groups * draw(st.integers(2 if groups == 1 else 1, 3))
    return ExpertPlacement(experts, groups * ranks_per_group, groups)


class AnyPlacement(ExpertExchangeContract):
    top_k = TOP_K

    def __init__(self, exchange: Callable[[ExchangeContext], ExpertExchange]) -> None:
        self._exchange = exchange

    def create(self, context: ExchangeContext) -> ExpertExchange:
        return self._exchange(context)


@pytest.mark.parametrize("exchange", [AllReduceExchange, AllToAllExchange])
@example(ExpertPlacement(4, 4, 4), 1, False, 0)  # most ranks have no token of their own
@given(placements(), st.integers(1, 12), st.booleans(), st.integers(0, 999))
def test_each_token_gets_the_sum_over_its_experts(
    exchange: type, placement: ExpertPlacement, tokens: int, partial: bool, seed: int
) -> None:
    """Catches: a token run twice, results sent to another rank or added to another token."""
    contract = AnyPlacement(exchange)
    launch = contract.launch(placement, tokens, partial=partial, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    launch.experts[torch.rand(tokens, TOP_K, generator=generator) < 0.2] = -1
    contract.check(placement, launch)


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
