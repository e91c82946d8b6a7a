"""Decode launches of the backend ``flashinfer`` inside CUDA graphs.

What a recorded kernel launch fixes: its grid, and the places in memory that it reads. FlashInfer's
planner decides both from the lengths of the rows, so a graph can be replayed with other lengths
only if grid and places stay the same. Two ways, by the number of rows (``scheduler.cuh``, 0.6.12):

- **Few rows are split** into pieces, so that the whole device reads K and V. In the planner's mode
  for graphs the grid has the largest number of pieces, those too many are marked as such, every
  list is laid out for that many, and rows are always treated as split. The lists themselves
  (which piece reads what) follow the numbers of pages: they are planned and copied before a replay
  unless every row has as many pages as in the one before.
- **From some number of rows on none is split** (``Kernel.never_splits``, or as the planner says).
  Then piece ``i`` is row ``i``, whatever the lengths; the one number that differs, the size of a
  piece, is not read. Nothing is planned before a replay: the kernels find the lengths in the page
  index, which the graph itself computes at its head. The tensor-core kernel is planned without the
  mode for graphs here, which would write partial results and merge them for nothing.

``prepare_capture`` plans with the shortest and the longest rows and compares, ``prepare_replay``
compares each plan with the recorded one: a difference would mean wrong results, and is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention import AttentionContext, Batch
from minisgl.errors import MinisglError
from minisgl_attn_flashinfer.buffers import CopyEvent, HostBuffers, PageIndex
from minisgl_attn_flashinfer.kernels import Kernel, Run, Workspace, is_split
from minisgl_attn_flashinfer.sizes import Shape, decode_int_workspace_bytes


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A recorded launch: its own buffers, and what its plans must look like.

    Attributes:
        run: the launch, one layer a call.
        num_tokens: rows of the graph.
        kernel, workspace, index: what the launch uses.
        plan_info: numbers that the recording has fixed.
        planned: whether the lengths matter to the schedule, so that each replay is planned.
        last_pages: int32, host: pages of the rows that the schedule was planned for.
    """

    run: Run
    num_tokens: int
    kernel: Kernel
    workspace: Workspace
    index: PageIndex
    plan_info: tuple[int, ...]
    planned: bool
    last_pages: npt.NDArray[np.int32]


class FlashInferGraphs:
    """Implements ``CudaGraphSupport``; see the module for how.

    **Which buffers are shared.** On the device, graphs run one after the other on one stream, and
    so do the copies before them. So all sizes share the float workspace and the list of pages,
    which the head of each graph writes anew. Each size has its own schedule, because a graph
    whose replays are not planned relies on finding it as it was. One copy of it suffices, though
    slots alternate: the copy for the next replay waits in the stream behind this one.
    On the host, a copy reads pinned memory when the stream gets there, while the host goes on to
    the next step: pinned memory alternates with the slots, and is reused after its event.

    Args:
        context: of the engine.
        shape: of the launches.
        choose: the decode kernel for so many rows and so large a group.
        floats: the float workspace.
        make_event: ``torch.cuda.Event``, or a stand-in.
    """

    def __init__(
        self,
        context: AttentionContext,
        shape: Shape,
        choose: Callable[[int, int], Kernel],
        floats: torch.Tensor,
        make_event: Callable[[], CopyEvent],
    ) -> None:
        self._device = context.device
        self._page_indices = context.ops.page_indices
        self._max_rows = context.max_running_requests
        self._max_seq_len = context.max_seq_len
        self._shape = shape
        self._choose = choose
        self._floats = floats
        self._make_event = make_event
        self._hosts: list[HostBuffers] = []
        self._indices: torch.Tensor | None = None

    def prepare_capture(self, batch: Batch) -> GraphPlan:
        """Make the buffers and the plan of a graph of ``batch.num_rows`` rows.

        Raises:
            MinisglError: this version of FlashInfer plans otherwise than expected.
        """
        rows = batch.num_rows
        kernel = self._choose(rows, self._shape.group)
        schedule_bytes = decode_int_workspace_bytes(self._shape, rows)
        self._make_hosts(rows, schedule_bytes)
        workspace = Workspace(self._floats, self._zeros(schedule_bytes, torch.uint8))
        index = PageIndex(
            qo_indptr=torch.arange(rows + 1, dtype=torch.int32, device=self._device),
            kv_indptr=self._zeros(rows + 1),
            indices=self._pages_of(rows),
            last_page_lens=self._zeros(rows),
        )
        graph = not kernel.never_splits(rows)

        def plan(kv_lens: npt.NDArray[np.int32]) -> Sequence[int]:
            return self._plan(self._hosts[0], kernel, workspace, kv_lens, graph=graph)

        shortest = plan(np.ones(rows, dtype=np.int32))
        longest = plan(np.full(rows, self._max_seq_len, dtype=np.int32))
        info = plan(batch.kv_lens)
        fixed = tuple(info)
        for other in (shortest, longest):
            self._check(fixed, other, rows)
        planned = is_split(fixed)
        if planned and not graph:
            raise MinisglError(
                f"FlashInfer splits a decode launch of {rows} rows, which minisgl takes to be too "
                "many for that; turn CUDA graphs off, and report this with the version of "
                "flashinfer-python"
            )
        return GraphPlan(
            run=kernel.bind(workspace, info, index),
            num_tokens=rows,
            kernel=kernel,
            workspace=workspace,
            index=index,
            plan_info=fixed,
            planned=planned,
            last_pages=self._num_pages(batch.kv_lens),
        )

    def enqueue(self, batch: Batch, plan: GraphPlan) -> None:
        """Launch the page index of the graph, from the batch's device tensors.

        With programmatic dependent launch an attention kernel reads the index before it waits for
        the kernel in front of it: that must not be this one. In a model it is layers away.
        """
        index = plan.index
        self._page_indices(
            batch.page_table,
            batch.rows,
            batch.kv_lens_device,
            self._shape.page_size,
            index.kv_indptr,
            index.indices,
            index.last_page_lens,
        )

    def prepare_replay(self, plan: GraphPlan, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        """Plan the next replay, if its lengths matter to the schedule; see the interface.

        Raises:
            MinisglError: the plan is not the recorded one; the graph must not be replayed.
        """
        if not plan.planned:
            return
        pages = self._num_pages(kv_lens)
        if np.array_equal(pages, plan.last_pages):
            return
        plan.last_pages[:] = 0  # of no row: what fails here is planned again next time
        info = self._plan(self._hosts[slot], plan.kernel, plan.workspace, kv_lens, graph=True)
        self._check(plan.plan_info, info, plan.num_tokens)
        plan.last_pages[:] = pages

    def _num_pages(self, kv_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        page_size = self._shape.page_size
        return (kv_lens + (page_size - 1)) // page_size

    def _plan(
        self,
        host: HostBuffers,
        kernel: Kernel,
        workspace: Workspace,
        kv_lens: npt.NDArray[np.int32],
        *,
        graph: bool,
    ) -> Sequence[int]:
        rows = len(kv_lens)
        host.acquire()
        host.fill_kv(kv_lens, self._shape.page_size)
        info = kernel.plan(workspace, host, rows, rows, graph=graph)
        host.release()
        return info

    def _check(self, recorded: tuple[int, ...], planned: Sequence[int], rows: int) -> None:
        found = tuple(planned)
        if found != recorded:
            raise MinisglError(
                f"FlashInfer planned a decode launch of {rows} rows as {found}, but its CUDA graph "
                f"needs {recorded}; turn CUDA graphs off, and report this with the version of "
                "flashinfer-python"
            )

    def _make_hosts(self, rows: int, schedule_bytes: int) -> None:
        """Make the pinned buffers of both slots, for the largest graph; captures begin with it."""
        rows = max(rows, self._max_rows)
        if self._hosts and self._hosts[0].max_rows >= rows:
            return
        schedule_bytes = max(schedule_bytes, decode_int_workspace_bytes(self._shape, rows))
        self._hosts = [
            HostBuffers(
                rows,
                schedule_bytes,
                pin=self._device.type == "cuda",
                make_event=self._make_event,
            )
            for _ in range(2)
        ]

    def _pages_of(self, rows: int) -> torch.Tensor:
        """Return a list for the pages of ``rows`` rows of any length, shared by all graphs."""
        pages = max(rows, self._max_rows) * -(-self._max_seq_len // self._shape.page_size)
        if self._indices is None or len(self._indices) < pages:
            self._indices = self._zeros(pages)
        return self._indices

    def _zeros(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)
