"""How tokens get to the experts of other ranks, and what these make of them back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.distributed.communicator import Communicator
from minisgl.moe.placement import ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """What an exchange is created with.

    Attributes:
        communicator: of all ranks that share the model.
        placement: which of them holds which experts.
        device, dtype: of hidden states.
        top_k: experts a token.
        hidden_size: elements of a hidden state.
        max_num_tokens: most tokens of one launch.
    """

    communicator: Communicator
    placement: ExpertPlacement
    device: torch.device
    dtype: torch.dtype
    top_k: int
    hidden_size: int
    max_num_tokens: int


@dataclass(frozen=True, slots=True)
class DispatchedTokens:
    """The tokens that one rank's experts run, each at most once.

    Attributes:
        hidden: ``[N, hidden_size]``.
        weights, experts: of all the experts of each token, ``[N, top_k]``, as ``MoeBackend`` takes
            them; those of other ranks are still among them.
        state: what ``combine`` of the same exchange needs.
    """

    hidden: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    state: Any = None


class ExpertExchange(ABC):
    """Brings tokens to the ranks that hold their experts, and the results to all ranks.

    One object serves all layers of a model. The ranks call it in step, with equal arguments but for
    ``out`` and ``partial``: behind attention each of them has all tokens of a launch.
    ``minisgl.testing.exchange_contract`` holds the tests that an exchange inherits.
    """

    @abstractmethod
    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> DispatchedTokens:
        """Return the tokens that this rank runs: at least all that have an expert here.

        Args:
            hidden: ``[T, hidden_size]``, the same on all ranks.
            weights: float32, ``[T, top_k]``.
            experts: int32, ``[T, top_k]``; -1 for none.
        """

    @abstractmethod
    def combine(
        self, out: torch.Tensor, tokens: DispatchedTokens, partial: torch.Tensor | None
    ) -> torch.Tensor:
        """Return each token's sum over all ranks, ``[T, hidden_size]``, the same bits on each.

        Args:
            out: ``[N, hidden_size]``, what this rank's experts add to its tokens' sums; may be
                written to.
            tokens: what ``dispatch`` returned.
            partial: ``[T, hidden_size]``, what else this rank adds to the sums, as its part of an
                expert that all tokens visit; may be written to.
        """
