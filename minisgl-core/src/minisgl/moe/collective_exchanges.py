"""The core's exchanges of experts, out of a communicator's collectives.

Hidden states are the same on all ranks, so neither has to send any to the experts. They differ in
how the experts' results are added up.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.moe.exchange import DispatchedTokens, ExchangeContext, ExpertExchange


class AllReduceExchange(ExpertExchange):
    """Each rank runs its experts on all tokens, and all ranks add up sums of all tokens."""

    def __init__(self, context: ExchangeContext) -> None:
        self._communicator = context.communicator

    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> DispatchedTokens:
        """Return the tokens as they are."""
        return DispatchedTokens(hidden, weights, experts)

    def combine(
        self,
        out: torch.Tensor,
        tokens: DispatchedTokens,  # noqa: ARG002
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add up over the ranks."""
        return self._communicator.all_reduce(out if partial is None else out + partial)


class AllToAllExchange(ExpertExchange):
    """Each rank runs the tokens that have an expert there; each token has a rank that adds up.

    A result is sent once, from the rank that has it to the token's own, and the sums are gathered.
    An all-reduce moves each token's row from every rank instead, zeros included: with few experts
    a token and many ranks this moves less. With a ``partial`` sum no row is zero, so then it is
    an all-reduce, of which no more than the tokens' selection is saved.
    """

    def __init__(self, context: ExchangeContext) -> None:
        self._communicator = context.communicator
        self._placement = context.placement

    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> DispatchedTokens:
        """Return the tokens that have an expert here; the state is who has which."""
        visits = self._visits(experts)
        here = visits[:, self._communicator.rank].nonzero().squeeze(1)
        return DispatchedTokens(hidden[here], weights[here], experts[here], (visits, here))

    def combine(
        self, out: torch.Tensor, tokens: DispatchedTokens, partial: torch.Tensor | None
    ) -> torch.Tensor:
        """Send each row to its token's own rank, add up there, and gather."""
        visits, here = tokens.state
        if partial is not None:
            return self._communicator.all_reduce(partial.index_add(0, here, out))
        num_tokens, (rank, size) = len(visits), (self._communicator.rank, self._communicator.size)
        share = -(-num_tokens // size)
        # [own rank, token there, rank with experts]: tokens belong to ranks in order.
        visits = F.pad(visits, (0, 0, 0, share * size - num_tokens)).view(size, share, size)
        counts = visits.sum(dim=1)
        rows = self._communicator.all_to_all(out, counts[:, rank].tolist(), counts[rank].tolist())
        places = visits[rank].T.nonzero()[:, 1]
        sums = out.new_zeros((share, *out.shape[1:])).index_add_(0, places, rows)
        return self._communicator.all_gather(sums, dim=0)[:num_tokens]

    def _visits(self, experts: torch.Tensor) -> torch.Tensor:
        """Return which ranks have an expert of each token, bool ``[T, ranks]``."""
        placement = self._placement
        groups = torch.arange(placement.num_groups, device=experts.device)
        group = experts.div(placement.experts_per_group, rounding_mode="floor")
        visits = (group.unsqueeze(-1) == groups).any(dim=1)
        return visits.repeat_interleave(placement.ranks_per_group, dim=1)
