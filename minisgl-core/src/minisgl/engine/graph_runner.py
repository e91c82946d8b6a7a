"""Decode as one CUDA graph: from the received plan and each row's last token to the next tokens.

One graph a number of rows, recorded largest first from one memory pool. A launch replays the
smallest graph that holds its rows; the rest are padding, the row of the dummy page. Between two
replays the host only copies the plan and what the attention backend planned.
"""

import bisect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend
from minisgl.engine.row_state import RowState
from minisgl.kernel.rows import DecodeInputs
from minisgl.models.interface import BaseLLMModel

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int32]
Replay = Callable[[], None]
Step = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Turns device work into something that can be run again and again."""

    def record(self, step: Step) -> tuple[Replay, torch.Tensor]:
        """Run ``step`` once for all that happens the first time, and record it.

        Returns what replays it, and a tensor that then holds its result until the next replay of
        any recorded step.
        """

    def forget(self) -> None:
        """Give back the memory of everything recorded."""


class CudaGraphs:
    """CUDA graphs that share one memory pool, which is possible as they run in turn."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def forget(self) -> None:
        """Destroy all graphs."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()


class CudaGraphRecorder(CudaGraphs):
    """Records a graph a step."""

    def record(self, step: Step) -> tuple[Replay, torch.Tensor]:
        """Run ``step`` on the current stream, then record it."""
        step()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            result = step()
        self._graphs.append(graph)
        # The result's memory goes back to the pool, for smaller graphs; what is in it stays
        # readable until one of them runs.
        return graph.replay, alias(result)


@dataclass(slots=True)
class _Recorded:
    """The graph of one number of rows, and where it leaves its results."""

    size: int
    plan: Any
    kv_lens: IntArray
    replay: Replay
    logits: torch.Tensor
    tokens: torch.Tensor


class ReplayTimer:
    """Measures how long the device waits between replays, by CUDA events around each.

    What runs between two replays counts as waiting here, such as the copies of plan and tokens.

    Args:
        most: replays to time; later ones are not.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, replay: Replay) -> None:
        """Replay, between two events."""
        if len(self._events) >= self._most:
            replay()
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        replay()
        after.record()
        self._events.append((before, after))

    def idle_us(self) -> list[float]:
        """Wait for all, and return the microseconds between each two consecutive ones."""
        torch.cuda.synchronize()
        return [
            1000 * after.elapsed_time(before) for (_, after), (before, _) in pairwise(self._events)
        ]


class GraphRunner:
    """Records and replays decode launches.

    Attributes:
        timer: for a measurement that sets it.

    Args:
        model: whose forward pass is recorded.
        attention: a backend with ``cuda_graphs``.
        state: the rows; decode launches feed those of its order.
        sizes: numbers of rows to record.
        recorder: how; CUDA graphs unless a test says otherwise.
        shared_sizes: of launches in which rows share a prefix; none, if the backend takes none.
    """

    def __init__(
        self,
        model: BaseLLMModel,
        attention: AttentionBackend,
        state: RowState,
        sizes: Sequence[int],
        recorder: Recorder | None = None,
        *,
        shared_sizes: Sequence[int] = (),
    ) -> None:
        assert attention.cuda_graphs is not None, "the backend takes part in recordings"
        self._model = model
        self._graphs = attention.cuda_graphs
        self._state = state
        self._recorder = recorder or CudaGraphRecorder()
        self.sizes = sorted(sizes)
        self.shared_sizes = sorted(shared_sizes)
        assert not shared_sizes or self.shared_sizes[-1] == self.sizes[-1]
        self._inputs = DecodeInputs.allocate(self.sizes[-1], state.device)
        self._tokens = torch.zeros(self.sizes[-1], dtype=torch.int32, device=state.device)
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        self.timer: ReplayTimer | None = None

    @property
    def max_rows(self) -> int:
        """Most rows of a launch that can be replayed."""
        return self.sizes[-1]

    def record(self, progress: Callable[[Sequence[int]], Iterable[int]]) -> None:
        """Record the graphs of all sizes, the largest first: the others fit into its memory.

        Args:
            progress: wraps the sizes, to show how far it is.
        """
        for size in progress(self.sizes[::-1]):
            for shared in (True, False) if size in self.shared_sizes else (False,):
                self._recorded[size, shared] = self._record(size, shared=shared)

    def record_largest(self) -> None:
        """Record the largest graph only, to see how much memory it takes."""
        for shared in (True, False) if self.shared_sizes else (False,):
            self._recorded[self.max_rows, shared] = self._record(self.max_rows, shared=shared)

    def forget(self) -> None:
        """Drop all graphs and give their memory back."""
        self._recorded.clear()
        self._recorder.forget()

    def replay(
        self, kv_lens: IntArray, slot: int, *, shares: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the next decode launch, whose plan has been received but not applied.

        Args:
            kv_lens: int32 ``[R]``, host: tokens of each row, the new one included.
            slot: alternates from step to step.
            shares: rows share prefixes, as the row state says.

        Returns:
            The logits ``[R, vocab]`` and the tokens, int32 ``[R]``, both valid until the next
            replay. The rows' last tokens are these already.
        """
        num_rows = len(kv_lens)
        shares = shares and bool(self.shared_sizes)
        sizes = self.shared_sizes if shares else self.sizes
        recorded = self._recorded[sizes[bisect.bisect_left(sizes, num_rows)], shares]
        recorded.kv_lens[:num_rows] = kv_lens
        recorded.kv_lens[num_rows:] = 1
        self._graphs.prepare_replay(recorded.plan, recorded.kv_lens, slot)
        if self.timer is None:
            recorded.replay()
        else:
            self.timer.run(recorded.replay)
        return recorded.logits[:num_rows], recorded.tokens[:num_rows]

    def _record(self, size: int, *, shared: bool) -> _Recorded:
        state, inputs = self._state, self._inputs.first(size)
        kv_lens = np.ones(size, dtype=np.int32)
        tokens = self._tokens[:size]
        batch = Batch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            sample_indices=None,
            rows=state.rows.order[:size],
            num_decode_rows=size,
            query_lens=kv_lens,
            kv_lens=kv_lens,
            kv_lens_device=inputs.kv_lens,
            page_table=state.rows.page_table,
            page_size=state.page_size,
            shared=state.shared if shared else None,
        )
        plan = batch.plan = self._graphs.prepare_capture(batch)
        replay, logits = self._recorder.record(lambda: self._step(batch, inputs, tokens))
        return _Recorded(size, plan, kv_lens, replay, logits, tokens)

    def _step(self, batch: Batch, inputs: DecodeInputs, tokens: torch.Tensor) -> torch.Tensor:
        """Everything that a replay does; returns the logits."""
        state, ops = self._state, self._state.ops
        ops.apply_plan(state.inbox, state.rows)
        ops.advance_rows(state.rows, inputs, state.page_size)
        self._graphs.enqueue(batch, batch.plan)
        logits = self._model.forward(batch)
        sampled = ops.sample_gumbel(logits, inputs.temperature, inputs.seed, inputs.places)
        state.rows.last_token[batch.rows] = sampled
        tokens.copy_(sampled)
        return logits


class _CudaMemory:
    """Memory that somebody else keeps, for ``torch.as_tensor``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same CUDA memory that does not keep it allocated."""
    words = torch.as_tensor(_CudaMemory(tensor), device=tensor.device)
    return words.view(tensor.dtype)


def shared_sizes(sizes: Sequence[int]) -> list[int]:
    """Return those of ``sizes`` to record for rows that share a prefix: further apart.

    Each is half as large again as the one below it, or larger: to compute padding costs less than
    to record as many graphs again.
    """
    chosen = [max(sizes)]
    for size in sorted(sizes, reverse=True):
        if size > 1 and 3 * size <= 2 * chosen[-1]:
            chosen.append(size)
    return sorted(chosen)


def graph_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows to record graphs for, up to ``max_rows``: close where it pays."""
    sizes = [1, 2, 4, *range(8, min(max_rows, 256) + 1, 8), *range(272, max_rows + 1, 16)]
    return sorted({size for size in sizes if size < max_rows} | {max_rows})
