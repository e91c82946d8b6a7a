"""The core's exchanges keep the contract that they set for others, and it finds what it is for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.distributed.communicator import Communicator
from minisgl.moe.collective_exchanges import AllReduceExchange, AllToAllExchange
from minisgl.moe.exchange import DispatchedTokens, ExchangeContext, ExpertExchange
from minisgl.moe.placement import ExpertPlacement
from minisgl.testing.exchange_contract import ExpertExchangeContract
from support.gloo_ranks import run_gloo


class TestAllReduce(ExpertExchangeContract):
    def create(self, context: ExchangeContext) -> ExpertExchange:
        return AllReduceExchange(context)


class TestAllToAll(ExpertExchangeContract):
    dtype = torch.bfloat16

    def create(self, context: ExchangeContext) -> ExpertExchange:
        return AllToAllExchange(context)


class OverGloo(ExpertExchangeContract):
    """Collectives of real groups, of launches whose sums are too large for the quick reduction."""

    placements = ExpertExchangeContract.placements[1:]
    num_tokens = (1, 13)
    hidden_size = 4096

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def run_ranks(self, size: int, work: Callable[[Communicator], Any]) -> list[Any]:
        (self.folder / "store").unlink(missing_ok=True)
        return run_gloo(self.folder, size, work)


class TestAllReduceOverGloo(OverGloo):
    def create(self, context: ExchangeContext) -> ExpertExchange:
        return AllReduceExchange(context)


class TestAllToAllOverGloo(OverGloo):
    def create(self, context: ExchangeContext) -> ExpertExchange:
        return AllToAllExchange(context)


class NoSum(AllReduceExchange):
    """Each rank keeps what its own experts made."""

    def combine(self, out, tokens, partial):
        return out if partial is None else out + partial


class ForgetsPartial(AllReduceExchange):
    def combine(self, out, tokens, partial):
        return super().combine(out, tokens, None)


class PartialOfRankZero(AllReduceExchange):
    """Takes the partial sum for a whole one."""

    def combine(self, out, tokens, partial):
        return super().combine(out, tokens, partial if self._communicator.rank == 0 else None)


class WritesToHidden(AllReduceExchange):
    def dispatch(self, hidden, weights, experts):
        self._hidden = hidden
        return super().dispatch(hidden, weights, experts)

    def combine(self, out, tokens, partial):
        return self._hidden.copy_(super().combine(out, tokens, partial))


class OwnRankFirst(ExpertExchange):
    """Each rank adds up in an order of its own: other bits."""

    def __init__(self, context: ExchangeContext) -> None:
        self._communicator = context.communicator

    def dispatch(self, hidden, weights, experts):
        return DispatchedTokens(hidden, weights, experts)

    def combine(self, out, tokens, partial):
        ranks, size = self._communicator, self._communicator.size
        parts = ranks.all_gather((out if partial is None else out + partial).unsqueeze(0), dim=0)
        return sum(parts[(ranks.rank + step) % size] for step in range(size))


class CountsFromTheEnd(AllToAllExchange):
    """Takes -1 for the last expert."""

    def dispatch(self, hidden, weights, experts):
        return super().dispatch(hidden, weights, experts % self._placement.num_experts)


class SkipsItsOwn(AllToAllExchange):
    """Runs only the tokens that some other rank has, too."""

    def _visits(self, experts):
        visits = super()._visits(experts)
        return visits & (visits.sum(dim=1, keepdim=True) > 1)


class OncePerExpert(AllToAllExchange):
    """A token with two experts on a rank is run twice there, each time with both."""

    def dispatch(self, hidden, weights, experts):
        tokens = super().dispatch(hidden, weights, experts)
        visits, here = tokens.state
        twice = torch.cat((here, here))
        return DispatchedTokens(hidden[twice], weights[twice], experts[twice], (visits, here))

    def combine(self, out, tokens, partial):
        return super().combine(out[: len(tokens.state[1])], tokens, partial)


class AddsToTheLastSums(AllReduceExchange):
    """Has one buffer for all launches, and never clears it."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        self._sums = torch.zeros(context.max_num_tokens, context.hidden_size)

    def combine(self, out, tokens, partial):
        sums = super().combine(out, tokens, partial)
        return self._sums[: len(sums)].add_(sums)


class LosesTheLastTokens(AllToAllExchange):
    """Gathers whole shares alone: wrong unless the ranks divide the tokens."""

    def combine(self, out, tokens, partial):
        size = self._communicator.size
        sums = super().combine(out, tokens, partial)
        sums[len(sums) // size * size :] = 0
        return sums


PLACEMENT = ExpertPlacement(num_experts=12, num_ranks=4, num_groups=4)


@pytest.mark.parametrize(
    ("fault", "test", "given"),
    [
        (NoSum, "sums", {"tokens": 8, "partial": False}),
        (NoSum, "all_tokens_on_one_rank", {"tokens": 3, "partial": False}),
        (ForgetsPartial, "sums", {"tokens": 1, "partial": True}),
        (PartialOfRankZero, "tokens_without_experts", {"tokens": 3, "partial": True}),
        (WritesToHidden, "inputs_stay_as_they_are", {"tokens": 3, "partial": False}),
        (OwnRankFirst, "all_ranks_have_the_same_bits", {"tokens": 13, "partial": True}),
        (OwnRankFirst, "all_ranks_have_the_same_bits", {"tokens": 13, "partial": False}),
        (CountsFromTheEnd, "tokens_without_experts", {"tokens": 3, "partial": False}),
        (
            SkipsItsOwn, "tokens_without_an_expert_on_most_ranks", {"tokens": 8, "partial": False},
        ),
        (OncePerExpert, "each_rank_runs_the_tokens_of_its_experts_once", {"tokens": 8}),
        (AddsToTheLastSums, "launches_in_turn", {"partial": True}),
        (LosesTheLastTokens, "sums", {"tokens": 13, "partial": False}),
        (LosesTheLastTokens, "sums", {"tokens": 1, "partial": False}),
    ],
)  # fmt: skip
def test_the_contract_finds_faults(fault: type[Any], test: str, given: dict[str, Any]) -> None:
    class Faulty(ExpertExchangeContract):
        def create(self, context: ExchangeContext) -> ExpertExchange:
            return fault(context)

    with pytest.raises(AssertionError):
        getattr(Faulty(), f"test_{test}")(PLACEMENT, **given)
