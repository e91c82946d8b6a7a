"""The collectives that tensor-parallel layers and exchanges of experts need."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Communicator(ABC):
    """One rank's view of a tensor-parallel group."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``tensor`` over all ranks; may reuse its memory."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return all ranks' tensors, concatenated along ``dim`` in the order of ranks."""

    @abstractmethod
    def all_to_all(
        self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        """Return the rows that all ranks have for this one, in the order of ranks.

        Args:
            rows: ``[sum(send), ...]``: those for rank 0, then those for rank 1, and so on.
            send: number of rows for each rank.
            receive: number of rows from each rank, which must be what it sends.
        """


class SingleCommunicator(Communicator):
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:  # noqa: ARG002
        """Return ``tensor``."""
        return tensor

    def all_to_all(
        self,
        rows: torch.Tensor,
        send: Sequence[int],  # noqa: ARG002
        receive: Sequence[int],  # noqa: ARG002
    ) -> torch.Tensor:
        """Return ``rows``."""
        return rows
