"""Collectives over gloo give what the threads of the tests' own communicator give."""

import threading
from pathlib import Path

import pytest
import torch

from minisgl.distributed.communicator import Communicator
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.progress import ProgressBoard
from minisgl.errors import EngineLostError
from minisgl.testing.communicators import run_ranks
from support.gloo_ranks import run_gloo
from support.patience import PATIENCE

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_equal_those_of_threads(tmp_path: Path, size: int) -> None:
    def work(communicator: Communicator) -> list[torch.Tensor]:
        results = []
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(communicator.rank)
            values = torch.randint(-9, 9, (3, 5, 4), generator=generator).to(dtype)
            results += [communicator.all_gather(values, dim=dim) for dim in (0, 1, -1)]
            results.append(communicator.all_gather(values.transpose(0, 2)))
            results.append(communicator.all_reduce(values.transpose(0, 2)))
            results.append(communicator.all_reduce(values.clone()))
            results.append(communicator.all_gather(values[:0]))
            results.append(communicator.all_reduce(values[:0]))
            # Ranks send 0 to 3 rows to each other, some of them none at all to themselves.
            counts = [[(3 * a + 2 * b) % 4 for b in range(size)] for a in range(size)]
            send = counts[communicator.rank]
            receive = [row[communicator.rank] for row in counts]
            rows = torch.randint(-9, 9, (4, sum(send), 2), generator=generator).to(dtype)
            results.append(communicator.all_to_all(rows.transpose(0, 1), send, receive))
            results.append(communicator.all_to_all(rows[0, :0], [0] * size, [0] * size))
            large = values.repeat(1, 40, 111)
            results.append(communicator.all_reduce(large.transpose(0, 2)))
        return results

    expected = run_ranks(size, work)
    for rank, results in enumerate(run_gloo(tmp_path, size, work)):
        for result, right in zip(results, expected[rank], strict=True):
            assert result.dtype == right.dtype
            assert torch.equal(result, right)


@pytest.mark.parametrize("length", [1237, 123_457])
def test_sums_are_the_same_bits_on_every_rank(tmp_path: Path, length: int) -> None:
    """Ranks sample from what they sum: a last bit of difference would part them."""

    def work(communicator: Communicator) -> torch.Tensor:
        generator = torch.Generator().manual_seed(communicator.rank)
        return communicator.all_reduce(torch.randn(length, generator=generator))

    first, *others = run_gloo(tmp_path, 4, work)
    assert all(torch.equal(first, other) for other in others)


def test_a_collective_ends_when_another_rank_does_not_come(tmp_path: Path) -> None:
    waited = threading.Event()

    def work(communicator: GlooCommunicator) -> None:
        communicator.barrier()
        communicator.set_timeout(0.2)
        if communicator.rank == 1:
            assert waited.wait(PATIENCE)
            return
        with pytest.raises(
            EngineLostError, match=r"^rank 0 waited 0\.2 s \(parallel\.timeout\) for the"
        ):
            communicator.all_reduce(torch.ones(2))
        waited.set()

    run_gloo(tmp_path, 2, work)


def test_a_collective_ends_when_another_rank_has_left(tmp_path: Path) -> None:
    def work(communicator: GlooCommunicator) -> None:
        communicator.barrier()
        if communicator.rank == 1:
            communicator.close()
            with pytest.raises(EngineLostError, match="rank 1 has left"):
                communicator.barrier()
            return
        with pytest.raises(EngineLostError, match="rank 0 lost the other ranks") as caught:
            communicator.all_gather(torch.ones(2))
        assert ".cc" not in str(caught.value)

    run_gloo(tmp_path, 2, work)


def test_nobody_waits_for_ever_for_ranks_that_never_connect(tmp_path: Path) -> None:
    with ProgressBoard.new_file(2) as file:
        board = ProgressBoard(file, 2)
    with pytest.raises(EngineLostError, match="rank 0 found no other ranks"):
        GlooCommunicator(str(tmp_path / "store"), 0, 2, timeout=0.2, progress=board.ranks[0])
