"""Which rank holds which experts, and which part of each. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts of a layer over the ranks that share a model (as ``ep_size`` of SGLang).

    The ranks form ``num_groups`` equal groups of neighbours. Each group holds an equal share of the
    experts, and the ranks of a group share the inner elements of each expert: with one group that
    is plain tensor parallelism, with as many groups as ranks each expert is whole on one rank.

    Attributes:
        num_experts: a multiple of ``num_groups``.
        num_ranks: a multiple of ``num_groups``.
        num_groups: ``parallel.expert_parallel_size``.
    """

    num_experts: int
    num_ranks: int = 1
    num_groups: int = 1

    @property
    def ranks_per_group(self) -> int:
        """How many ranks share each expert."""
        return self.num_ranks // self.num_groups

    @property
    def experts_per_group(self) -> int:
        """How many experts a rank holds, whole or a part of each."""
        return self.num_experts // self.num_groups

    def experts_of(self, rank: int) -> range:
        """Return the numbers of the experts that a rank holds."""
        first = rank // self.ranks_per_group * self.experts_per_group
        return range(first, first + self.experts_per_group)

    def part_of(self, rank: int) -> int:
        """Return which of ``ranks_per_group`` parts of its experts a rank holds."""
        return rank % self.ranks_per_group
