"""Records and replays attention in CUDA graphs, as an engine does with a whole decode step."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend
from minisgl.testing.paged_rows import Groups, PagedRows


@dataclass(slots=True)
class _Recording:
    """One graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    plan: Any
    queries: list[torch.Tensor]
    outputs: list[torch.Tensor]


class GraphRecorder:
    """A graph of every size, recorded when the context is entered, largest first.

    Args:
        backend: takes part in CUDA graphs.
        rows: what it attends to.
        sizes: rows of the graphs.
        shared: record launches that are told of shared prefixes.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        rows: PagedRows,
        sizes: Sequence[int],
        *,
        shared: bool = False,
    ) -> None:
        self._backend = backend
        self._rows = rows
        self._sizes = sizes
        self._shared = shared
        self._recordings: dict[int, _Recording] = {}

    def __enter__(self) -> Self:
        """Record."""
        with torch.inference_mode():
            for size in sorted(self._sizes, reverse=True):
                self._recordings[size] = self._record(size)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait until everything has run, then let go of the graphs."""
        torch.cuda.synchronize()
        self._recordings.clear()

    def replay(
        self,
        size: int,
        rows: Sequence[int],
        kv_lens: Sequence[int],
        queries: Sequence[torch.Tensor],
        *,
        slot: int,
        groups: Groups = (),
    ) -> list[torch.Tensor]:
        """Replay the graph of a size and return the outputs of the real rows, asynchronously.

        Args:
            size: rows of the graph; those beyond ``rows`` are padding.
            rows: of the page table.
            kv_lens: tokens of each.
            queries: of each layer, ``[len(rows), q_heads, head_dim]``.
            slot: 0 or 1, in turns.
            groups: of rows that share a prefix: see ``PagedRows.share``.
        """
        assert self._backend.cuda_graphs is not None
        recording, padding = self._recordings[size], size - len(rows)
        lengths = np.array([*kv_lens, *[1] * padding], dtype=np.int32)
        with torch.inference_mode():
            table_rows = [*rows, *[self._rows.padding_row] * padding]
            recording.batch.rows.copy_(self._rows.to_device(table_rows, torch.int64))
            seen = self._rows.to_device(lengths.tolist(), torch.int32)
            recording.batch.kv_lens_device.copy_(seen)
            if recording.batch.shared is not None:
                told = self._rows.shared_prefixes(rows, groups, size)
                for part in ("members", "groups", "starts"):
                    getattr(recording.batch.shared, part).copy_(getattr(told, part))
            for static, fresh in zip(recording.queries, queries, strict=True):
                static[: len(rows)] = fresh
                static[len(rows) :] = 0
            self._backend.cuda_graphs.prepare_replay(recording.plan, lengths, slot)
            lengths[:] = 0  # the backend has no business with it any more
            recording.graph.replay()
            return [out[: len(rows)].clone() for out in recording.outputs]

    def _record(self, size: int) -> _Recording:
        graphs, rows = self._backend.cuda_graphs, self._rows
        assert graphs is not None
        batch = rows.batch([rows.padding_row] * size, [1] * size)
        if self._shared:
            batch.shared = rows.shared_prefixes([], (), size)
        queries = [rows.queries(size) for _ in rows.layers]
        plan = graphs.prepare_capture(batch)

        def run() -> list[torch.Tensor]:
            graphs.enqueue(batch, plan)
            # A kernel in front of the first attention, as projections are in a model.
            return [
                self._backend.attend(q * 1, layer, plan)
                for q, layer in zip(queries, rows.layers, strict=True)
            ]

        # What is loaded or compiled at first use must not be met while recording.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        return _Recording(graph, batch, plan, queries, outputs)
