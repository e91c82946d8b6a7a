"""Tensor parallelism in one process, for tests: one thread a rank."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from minisgl.distributed.communicator import Communicator

ResultT = TypeVar("ResultT")


class _Board:
    """Where the ranks of one group lay out their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors: list[torch.Tensor | None] = [None] * size


class ThreadCommunicator(Communicator):
    """One rank of a group whose ranks are threads; made by ``thread_group``."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.rank = rank
        self.size = size
        self._board = board

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, added up in the order of ranks on each of them."""
        return torch.stack(self._exchange(tensor)).sum(dim=0)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return all ranks' tensors, concatenated along ``dim``."""
        return torch.cat(self._exchange(tensor), dim=dim)

    def all_to_all(
        self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        """Return the rows that all ranks have for this one, in the order of ranks."""
        counts = self._exchange(torch.tensor(send))
        parts = []
        for sent, its_rows in zip(counts, self._exchange(rows), strict=True):
            first = int(sent[: self.rank].sum())
            parts.append(its_rows[first : first + int(sent[self.rank])])
        assert [len(part) for part in parts] == list(receive), "ranks disagree about the rows"
        return torch.cat(parts)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        board = self._board
        board.tensors[self.rank] = tensor.clone()
        board.barrier.wait()
        tensors = [part for part in board.tensors if part is not None]
        # Nobody overwrites the board before everybody has read it.
        board.barrier.wait()
        return tensors

    def abort(self) -> None:
        """Wake the other ranks with an error, for a rank that fails."""
        self._board.barrier.abort()


def thread_group(size: int) -> list[ThreadCommunicator]:
    """Return the communicators of a new group of ``size`` ranks."""
    board = _Board(size)
    return [ThreadCommunicator(rank, size, board) for rank in range(size)]


def run_ranks(size: int, work: Callable[[ThreadCommunicator], ResultT]) -> list[ResultT]:
    """Run ``work`` once a rank, each in its own thread; returns the results by rank.

    If a rank fails, its error is raised, not that of the ranks that waited for it.
    """

    def run(communicator: ThreadCommunicator) -> ResultT:
        try:
            # Inference mode is a thread's own, and the callers' tensors were made in it.
            with torch.inference_mode():
                return work(communicator)
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(run, communicator) for communicator in thread_group(size)]
        errors = [error for future in futures if (error := future.exception())]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
