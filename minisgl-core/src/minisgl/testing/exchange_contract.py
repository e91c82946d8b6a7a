"""The contract that every exchange of experts keeps, as tests to inherit.

A third-party exchange proves itself with a subclass in its own tests::

    class TestPlainExchange(ExpertExchangeContract):
        def create(self, context):
            return PlainExchange(context, PlainSettings())

Experts are stand-ins that multiply and add whole numbers, so that sums are exact in every dtype
and order. Needs pytest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import pytest
import torch

from minisgl.distributed.communicator import Communicator
from minisgl.moe.exchange import DispatchedTokens, ExchangeContext, ExpertExchange
from minisgl.moe.placement import ExpertPlacement
from minisgl.testing.communicators import run_ranks

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Launch:
    """What an exchange is given.

    Attributes:
        hidden: ``[T, hidden_size]``.
        weights: float32, ``[T, top_k]``.
        experts: int32, ``[T, top_k]``.
        partials: of each rank, ``[num_ranks, T, hidden_size]``; ``None`` for none.
    """

    hidden: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    partials: torch.Tensor | None

    def dispatch(self, exchange: ExpertExchange) -> DispatchedTokens:
        """Return the tokens of this rank; each rank has tensors of its own."""
        return exchange.dispatch(self.hidden.clone(), self.weights.clone(), self.experts.clone())

    def partial(self, rank: int) -> torch.Tensor | None:
        """Return what a rank adds beside its experts, which ``combine`` may write to."""
        return None if self.partials is None else self.partials[rank].clone()


class ExpertExchangeContract:
    """Inherit, override ``create`` and run pytest.

    Attributes:
        device, dtype: of hidden states.
        placements: ranks and groups of them to test; each group holds ``top_k`` experts or more.
        num_tokens: of the launches: fewer and more than ranks, multiples of them and not.
        top_k: experts a token.
        hidden_size: elements of a hidden state.
        tolerance: largest relative error of a token's sum: above 0 if rows are sent rounded.
    """

    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32
    placements: ClassVar[Sequence[ExpertPlacement]] = (
        ExpertPlacement(num_experts=12, num_ranks=2, num_groups=2),
        ExpertPlacement(num_experts=12, num_ranks=4, num_groups=4),
        ExpertPlacement(num_experts=12, num_ranks=4, num_groups=2),
    )
    num_tokens: ClassVar[Sequence[int]] = (1, 3, 8, 13)
    top_k: ClassVar[int] = 3
    hidden_size: ClassVar[int] = 16
    tolerance: ClassVar[float] = 0.0

    def create(self, context: ExchangeContext) -> ExpertExchange:
        """Return the exchange under test, of one rank."""
        raise NotImplementedError

    def run_ranks(self, size: int, work: Callable[[Communicator], ResultT]) -> list[ResultT]:
        """Run ``work`` once a rank, at the same time; the results by rank.

        Ranks are threads of this process here. Override it where an exchange needs more than that.
        """
        return run_ranks(size, work)

    # -- the tests

    def test_sums(self, placement: ExpertPlacement, tokens: int, *, partial: bool) -> None:
        """Every token's sum over all ranks, whoever holds its experts."""
        for seed in range(3):
            self.check(placement, self.launch(placement, tokens, partial=partial, seed=seed))

    def test_tokens_without_an_expert_on_most_ranks(
        self, placement: ExpertPlacement, tokens: int, *, partial: bool
    ) -> None:
        """Each token's experts are all of one group, and every group has some tokens."""
        launch = self.launch(placement, tokens, partial=partial)
        groups = torch.arange(tokens, device=self.device) % placement.num_groups
        _choose_within(groups, placement, launch)
        self.check(placement, launch)

    def test_all_tokens_on_one_rank(
        self, placement: ExpertPlacement, tokens: int, *, partial: bool
    ) -> None:
        """Or on one group of ranks: the others run nothing."""
        for group in range(placement.num_groups):
            launch = self.launch(placement, tokens, partial=partial)
            groups = torch.full((tokens,), group, device=self.device)
            _choose_within(groups, placement, launch)
            self.check(placement, launch)

    def test_tokens_without_experts(
        self, placement: ExpertPlacement, tokens: int, *, partial: bool
    ) -> None:
        """-1 is no expert, in one place of a token or in all of them, as padding rows have."""
        launch = self.launch(placement, tokens, partial=partial)
        launch.experts[:, 0] = -1
        launch.experts[tokens // 2 :] = -1
        self.check(placement, launch)
        launch.experts.fill_(-1)
        self.check(placement, launch)

    def test_no_tokens(self, placement: ExpertPlacement, *, partial: bool) -> None:
        """A launch may be empty."""
        self.check(placement, self.launch(placement, 0, partial=partial))

    def test_launches_in_turn(self, placement: ExpertPlacement, *, partial: bool) -> None:
        """One object serves all layers, and steps of any size: nothing is left of the last one."""
        sizes = (max(self.num_tokens), 1, 0, *self.num_tokens)
        self.check(
            placement,
            *(
                self.launch(placement, tokens, partial=partial != (seed % 3 == 2), seed=seed)
                for seed, tokens in enumerate(sizes)
            ),
        )

    def test_each_rank_runs_the_tokens_of_its_experts_once(
        self, placement: ExpertPlacement, tokens: int
    ) -> None:
        """With their own weights and experts; tokens without an expert there may be among them."""
        launch = self.launch(placement, tokens, partial=False)
        launch.hidden[:, 0] = torch.arange(tokens, device=self.device)
        launch.experts[::4] = -1

        def work(communicator: Communicator) -> DispatchedTokens:
            return launch.dispatch(self.create(self.context(placement, communicator)))

        for rank, dispatched in enumerate(self.run_ranks(placement.num_ranks, work)):
            held = placement.experts_of(rank)
            here = _among(dispatched.experts, held).any(dim=1)
            numbers, order = dispatched.hidden[here][:, 0].long().sort()
            needed = _among(launch.experts, held).any(dim=1).nonzero().squeeze(1)
            assert numbers.tolist() == needed.tolist(), f"rank {rank} runs {numbers.tolist()}"
            assert torch.equal(dispatched.experts[here][order], launch.experts[needed])
            assert torch.equal(dispatched.weights[here][order], launch.weights[needed])

    def test_all_ranks_have_the_same_bits(
        self, placement: ExpertPlacement, tokens: int, *, partial: bool
    ) -> None:
        """Ranks choose tokens from what they sum: a last bit of difference would part them."""
        launch = self.launch(placement, tokens, partial=partial)
        for values in (launch.hidden, launch.weights, launch.partials):
            if values is not None:
                values.normal_(generator=torch.Generator(self.device).manual_seed(tokens))
        first, *others = self.run(placement, launch)
        for rank, sums in enumerate(others, 1):
            assert torch.equal(sums[0], first[0]), f"ranks 0 and {rank} have different sums"

    def test_inputs_stay_as_they_are(
        self, placement: ExpertPlacement, tokens: int, *, partial: bool
    ) -> None:
        """Hidden states, weights and experts; what is added up may be written to."""
        launch = self.launch(placement, tokens, partial=partial)
        given = (launch.hidden, launch.weights, launch.experts)

        def work(communicator: Communicator) -> tuple[torch.Tensor, ...]:
            exchange = self.create(self.context(placement, communicator))
            hidden, weights, experts = (each.clone() for each in given)
            dispatched = exchange.dispatch(hidden, weights, experts)
            out = added_by(dispatched, placement, communicator.rank).to(self.dtype)
            exchange.combine(out, dispatched, launch.partial(communicator.rank))
            return hidden, weights, experts

        for left in self.run_ranks(placement.num_ranks, work):
            for name, before, after in zip(
                ("hidden", "weights", "experts"), given, left, strict=True
            ):
                assert torch.equal(before, after), f"{name} were written to"

    # -- what they are made of

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test for every combination of the attributes that it asks for."""
        for name, values, ids in (
            ("placement", self.placements, _name),
            ("tokens", self.num_tokens, str),
            ("partial", (False, True), lambda partial: "partial" if partial else "alone"),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=ids)

    def context(self, placement: ExpertPlacement, communicator: Communicator) -> ExchangeContext:
        """Return what the exchange of one rank is created with."""
        return ExchangeContext(
            communicator=communicator,
            placement=placement,
            device=torch.device(self.device),
            dtype=self.dtype,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            max_num_tokens=max(self.num_tokens),
        )

    def launch(
        self, placement: ExpertPlacement, tokens: int, *, partial: bool, seed: int = 0
    ) -> Launch:
        """Return random whole numbers, small enough for bfloat16; the same for the same arguments.

        A token's experts differ from one another.
        """
        random = torch.Generator(self.device).manual_seed(1000 * seed + tokens)

        def integers(least: int, most: int, *shape: int) -> torch.Tensor:
            return torch.randint(least, most + 1, shape, generator=random, device=self.device)

        order = torch.rand(tokens, placement.num_experts, generator=random, device=self.device)
        shape = (tokens, self.hidden_size)
        partials = integers(-2, 2, placement.num_ranks, *shape).to(self.dtype)
        return Launch(
            hidden=integers(-1, 1, *shape).to(self.dtype),
            weights=integers(1, 2, tokens, self.top_k).float(),
            experts=order.argsort(dim=1)[:, : self.top_k].int(),
            partials=partials if partial else None,
        )

    def run(self, placement: ExpertPlacement, *launches: Launch) -> list[list[torch.Tensor]]:
        """Return the sums, by rank and launch, of one exchange a rank."""

        def work(communicator: Communicator) -> list[torch.Tensor]:
            exchange = self.create(self.context(placement, communicator))
            sums = []
            for launch in launches:
                dispatched = launch.dispatch(exchange)
                out = added_by(dispatched, placement, communicator.rank).to(self.dtype)
                partial = launch.partial(communicator.rank)
                sums.append(exchange.combine(out, dispatched, partial).clone())
            return sums

        return self.run_ranks(placement.num_ranks, work)

    def check(self, placement: ExpertPlacement, *launches: Launch) -> None:
        """Compare every rank's sums with those that are due."""
        for rank, sums in enumerate(self.run(placement, *launches)):
            for number, (combined, launch) in enumerate(zip(sums, launches, strict=True)):
                assert (combined.dtype, combined.shape) == (self.dtype, launch.hidden.shape)
                due = sums_due(placement, launch)
                off = (combined.double() - due).norm(dim=1)
                wrong = ~(off <= self.tolerance * due.norm(dim=1))  # NaN is wrong, too
                assert not wrong.any(), (
                    f"launch {number}, rank {rank}: tokens {wrong.nonzero().flatten().tolist()} "
                    f"are off by up to {float(off.max()):.3g}"
                )


def added_by(tokens: DispatchedTokens, placement: ExpertPlacement, rank: int) -> torch.Tensor:
    """Return what a rank's experts add to its tokens' sums, float64, ``[N, hidden_size]``.

    Each of its experts gives ``hidden * (number + 1) + part``, so that no two are alike.
    """
    weights = torch.where(_among(tokens.experts, placement.experts_of(rank)), tokens.weights, 0.0)
    factors = (tokens.experts.double() + 1).unsqueeze(-1)
    each = tokens.hidden.double().unsqueeze(1) * factors + placement.part_of(rank)
    return (weights.double().unsqueeze(-1) * each).sum(dim=1)


def sums_due(placement: ExpertPlacement, launch: Launch) -> torch.Tensor:
    """Return every token's sum over all ranks, float64, ``[T, hidden_size]``."""
    everything = DispatchedTokens(launch.hidden, launch.weights, launch.experts)
    sums = torch.zeros_like(launch.hidden, dtype=torch.float64)
    for rank in range(placement.num_ranks):
        sums += added_by(everything, placement, rank)
    return sums if launch.partials is None else sums + launch.partials.double().sum(dim=0)


def _choose_within(groups: torch.Tensor, placement: ExpertPlacement, launch: Launch) -> None:
    """Let each token choose experts of its group of ranks alone; groups: ``[T]``."""
    num_tokens, top_k = launch.experts.shape
    token, place = torch.meshgrid(
        *(torch.arange(size, device=groups.device) for size in (num_tokens, top_k)), indexing="ij"
    )
    experts = (token + place) % placement.experts_per_group
    launch.experts.copy_(groups.unsqueeze(1) * placement.experts_per_group + experts)


def _among(experts: torch.Tensor, held: range) -> torch.Tensor:
    return (experts >= held.start) & (experts < held.stop)


def _name(placement: ExpertPlacement) -> str:
    return f"{placement.num_ranks}ranks-{placement.num_groups}groups"
