"""The collectives that tensor-parallel layers need."""

from abc import ABC, abstractmethod

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
