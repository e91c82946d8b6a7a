"""The backend ``flashinfer``: eager launches. Launches in CUDA graphs are in ``graphs.py``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from minisgl.attention import AttentionBackend, AttentionContext, AttentionLayerSpec, Batch
from minisgl.errors import UnsupportedBackendError
from minisgl_attn_flashinfer.buffers import CopyEvent, DeviceBuffers, HostBuffers
from minisgl_attn_flashinfer.choice import DecodeKernel, choose_decode_kernel
from minisgl_attn_flashinfer.graphs import FlashInferGraphs, GraphPlan
from minisgl_attn_flashinfer.kernels import Kernel, Run, Workspace
from minisgl_attn_flashinfer.sizes import INT_WORKSPACE_BYTES, Shape, decode_int_workspace_bytes


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded kernels; a phase without any is not served."""

    prefill: Kernel | None
    decode: Mapping[DecodeKernel, Kernel]

    def for_decode(self, rows: int, group: int) -> Kernel:
        """Return the kernel for a decode launch of ``rows`` rows."""
        return self.decode[choose_decode_kernel(rows, group, frozenset(self.decode))]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """An eager launch, ready to run layer by layer."""

    run: Run
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Lane:
    """The buffers of one slot and phase.

    A step may plan a decode and a prefill launch with one slot number before it runs either: so
    the phases share nothing but the float workspace, which is in use only while a kernel runs.
    """

    host: HostBuffers
    device: DeviceBuffers


class FlashInferBackend(AttentionBackend):
    """Paged attention through FlashInfer; made by ``create_backend``.

    Everything is launched on the caller's current stream, which must be the same for all calls:
    the order of that stream is what keeps device buffers from being overwritten too early.

    Args:
        context: of the engine.
        shape: of the launches.
        kernels: what was loaded.
        floats: uint8, the float workspace.
        make_event: ``torch.cuda.Event``, or a stand-in.
    """

    def __init__(
        self,
        context: AttentionContext,
        shape: Shape,
        kernels: Kernels,
        floats: torch.Tensor,
        make_event: Callable[[], CopyEvent],
    ) -> None:
        self._pool = context.kv_pool
        self._page_indices = context.ops.page_indices
        self._shape = shape
        self._kernels = kernels
        self._floats = floats
        rows = context.max_running_requests
        decode_bytes = decode_int_workspace_bytes(shape, rows)

        def lanes(schedule_bytes: int) -> list[_Lane]:
            pin = context.device.type == "cuda"
            return [
                _Lane(
                    HostBuffers(rows, schedule_bytes, pin=pin, make_event=make_event),
                    DeviceBuffers(rows, schedule_bytes, context.device),
                )
                for _ in range(2)
            ]

        self._decode_lanes = lanes(decode_bytes) if kernels.decode else []
        self._prefill_lanes = lanes(INT_WORKSPACE_BYTES) if kernels.prefill else []
        if kernels.decode:
            self.cuda_graphs = FlashInferGraphs(
                context, shape, kernels.for_decode, floats, make_event
            )

    def plan(self, batch: Batch, slot: int) -> LaunchPlan:
        """Plan a launch of decode rows, or of prefill rows and maybe decode rows before them."""
        if batch.num_decode_rows == batch.num_rows:
            return self._plan_decode(batch, slot)
        return self._plan_prefill(batch, slot)

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: LaunchPlan | GraphPlan,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend; see the interface. Inside a recording too."""
        assert new_kv is None, "this backend reads from the pool only"
        assert q.shape[0] == plan.num_tokens, "the queries are not those that were planned"
        # The pool allocates its memory later than this backend is made: ask at every call.
        k, v = self._pool.layer(layer.index)
        out = q.new_empty(q.shape)
        plan.run(q, k, v, out, layer.scale)
        return out

    def _plan_decode(self, batch: Batch, slot: int) -> LaunchPlan:
        rows = batch.num_rows
        if not self._kernels.decode:
            raise UnsupportedBackendError("backend 'flashinfer' has no decode kernel here")
        kernel = self._kernels.for_decode(rows, self._shape.group)
        return self._launch(kernel, self._decode_lanes[slot], batch, prefill=False)

    def _plan_prefill(self, batch: Batch, slot: int) -> LaunchPlan:
        kernel = self._kernels.prefill
        if kernel is None:
            raise UnsupportedBackendError("backend 'flashinfer' has no prefill kernel here")
        return self._launch(kernel, self._prefill_lanes[slot], batch, prefill=True)

    def _launch(self, kernel: Kernel, lane: _Lane, batch: Batch, *, prefill: bool) -> LaunchPlan:
        rows, tokens, host = batch.num_rows, batch.num_rows, lane.host
        host.acquire()
        num_pages = host.fill_kv(batch.kv_lens, self._shape.page_size)
        index = lane.device.index(rows, num_pages)
        self._page_indices(
            batch.page_table,
            batch.rows,
            batch.kv_lens_device,
            self._shape.page_size,
            index.kv_indptr,
            index.indices,
            index.last_page_lens,
        )
        if prefill:
            tokens = host.fill_queries(batch.query_lens)
            index.qo_indptr.copy_(host.qo_indptr[: rows + 1], non_blocking=True)
        # Last, and its copy too: with programmatic dependent launch a kernel of FlashInfer reads
        # its index while the kernel before it may still run, but not while a copy does.
        workspace = Workspace(self._floats, lane.device.schedule)
        info = kernel.plan(workspace, host, rows, tokens, graph=False)
        host.release()
        return LaunchPlan(kernel.bind(workspace, info, index), tokens)
