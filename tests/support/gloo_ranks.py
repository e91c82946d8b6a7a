"""Ranks that talk over gloo, as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.progress import ProgressBoard
from support.patience import PATIENCE


def run_gloo(
    folder: Path, size: int, work: Callable[[GlooCommunicator], Any], timeout: float = PATIENCE
) -> list[Any]:
    """Run ``work`` once a rank, each in a thread: a group belongs to no process."""
    with ProgressBoard.new_file(size) as file:
        board = ProgressBoard(file, size)

    def run(rank: int) -> Any:
        communicator = GlooCommunicator(
            str(folder / "store"), rank, size, timeout=timeout, progress=board.ranks[rank]
        )
        try:
            communicator.barrier()  # whoever leaves early would break the others' connecting
            with torch.inference_mode():
                return work(communicator)
        finally:
            communicator.close()

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
