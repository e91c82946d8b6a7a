"""Collectives between processes on CPUs, over gloo."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import (  # without public names
    AllgatherOptions,
    AllToAllOptions,
    FileStore,
)
from torch.distributed import AllreduceOptions, ProcessGroupGloo

from minisgl.distributed.communicator import Communicator
from minisgl.distributed.progress import RankProgress
from minisgl.errors import EngineLostError

_LOOPBACK: Final = "127.0.0.1"

_SOURCE: Final = re.compile(r"\[[^\]]*:\d+\]\s*")
"""Where in gloo's sources an error was raised, which it writes first."""

_SMALL: Final = 1 << 17
"""Bytes up to which latency is all: gathering takes half the messages of gloo's ring reduction."""


class GlooCommunicator(Communicator):
    """One rank of a process group of its own: nothing of ``torch.distributed``'s is global.

    The constructor returns once all ranks are connected. Each collective ends within the timeout,
    with its result or with an error, after which the group is of no use.

    Args:
        store: path of a file that only the ranks of this group use.
        rank, size: of this process, and of the group.
        timeout: seconds for one collective, see ``set_timeout``.
        progress: counts the collectives that this rank begins.

    Raises:
        EngineLostError: the others did not come.
    """

    def __init__(
        self, store: str, rank: int, size: int, *, timeout: float, progress: RankProgress
    ) -> None:
        self.rank = rank
        self.size = size
        self._progress = progress
        try:
            self._group: ProcessGroupGloo | None = _connect(store, rank, size, timeout)
        except RuntimeError as error:
            raise EngineLostError(f"rank {rank} found no other ranks: {_text(error)}") from error
        self.set_timeout(timeout, "parallel.start_timeout")

    def set_timeout(self, seconds: float, setting: str = "parallel.timeout") -> None:
        """Let collectives from now on fail when another rank is ``seconds`` late.

        Args:
            seconds: how late.
            setting: where they are set, for messages.
        """
        self._limit = f"{seconds:g} s ({setting})"
        self._reduce_options = AllreduceOptions()
        self._reduce_options.timeout = timedelta(seconds=seconds)
        self._gather_options = AllgatherOptions()
        self._gather_options.timeout = timedelta(seconds=seconds)
        self._swap_options = AllToAllOptions()
        self._swap_options.timeout = timedelta(seconds=seconds)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, the same bits on each; may reuse ``tensor``'s memory.

        Raises:
            EngineLostError: another rank has ended, or is late.
        """
        tensor = tensor.contiguous()
        if 0 < tensor.nbytes <= _SMALL:
            # Added up in the order of ranks, by each of them.
            return self._gather(tensor).sum(dim=0, dtype=tensor.dtype)
        if tensor.nbytes:
            self._wait(lambda group: group.allreduce([tensor], self._reduce_options))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return all ranks' tensors, concatenated along ``dim`` in the order of ranks.

        Raises:
            EngineLostError: another rank has ended, or is late.
        """
        return torch.cat(self._gather(tensor.contiguous()).unbind(0), dim=dim)

    def all_to_all(
        self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        """Return the rows that all ranks have for this one; see the base class.

        Raises:
            EngineLostError: another rank has ended, or is late.
        """
        rows = rows.contiguous()
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        into, out_of = list(receive), list(send)
        self._wait(
            lambda group: group.alltoall_base(received, rows, into, out_of, self._swap_options)
        )
        return received

    def barrier(self) -> None:
        """Wait until every rank is here.

        Raises:
            EngineLostError: another rank has ended, or is late.
        """
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Disconnect: the other ranks' collectives fail at once. Safe to call twice."""
        self._group = None

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[size, *shape]`` for a contiguous ``[*shape]``."""
        parts = tensor.new_empty((self.size, *tensor.shape))
        if tensor.nbytes:
            into = list(parts.unbind(0))
            self._wait(lambda group: group.allgather([into], [tensor], self._gather_options))
        return parts

    def _wait(self, begin: Any) -> None:
        if self._group is None:
            raise EngineLostError(f"rank {self.rank} has left its group")
        self._progress.count_collective()
        try:
            begin(self._group).wait()
        except RuntimeError as error:  # all that gloo raises
            raise self._lost(_text(error)) from error

    def _lost(self, text: str) -> EngineLostError:
        if "timed out" in text.lower():
            return EngineLostError(f"rank {self.rank} waited {self._limit} for the other ranks")
        return EngineLostError(f"rank {self.rank} lost the other ranks ({text})")


def _text(error: RuntimeError) -> str:
    """Return what an error of gloo says, in one line, without file names."""
    return _SOURCE.sub("", (str(error) or "no message").splitlines()[0]).rstrip(". ")


def _connect(store: str, rank: int, size: int, timeout: float) -> ProcessGroupGloo:
    """Connect the ranks over the loopback interface, whatever this host's name resolves to.

    The options' fields have underscores, yet are how torch.distributed.new_group sets them, too
    (torch/distributed/distributed_c10d.py, torch 2.4 to 2.13).
    """
    gloo: Any = ProcessGroupGloo  # its stub lacks the options
    options = gloo._Options()  # noqa: SLF001
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001
    shared = FileStore(store, size)
    shared.set_timeout(timedelta(seconds=timeout))
    group: ProcessGroupGloo = gloo(shared, rank, size, options)
    return group
