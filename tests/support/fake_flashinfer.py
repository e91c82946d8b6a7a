"""FlashInfer's modules without a GPU: they attend in torch, and their copies are late.

The schedule that a fake planner writes to pinned memory holds the lengths. It is copied to the
device as late as the stream allows: when somebody waits for an event behind it, or when a launch
behind it runs. A launch then requires that the schedule is its own. So a host buffer that is
written again too early shows, as it does on a card behind a stalled stream.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minisgl.attention.interface import AttentionContext
from minisgl_attn_flashinfer.backend import FlashInferBackend, Kernels
from minisgl_attn_flashinfer.buffers import HostBuffers, PageIndex
from minisgl_attn_flashinfer.kernels import Run, Workspace
from minisgl_attn_flashinfer.sizes import Shape


class FakeStream:
    """Copies in order, run late; and a log of what the host did."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queue: list[Callable[[], object]] = []
        self._done = 0

    def put(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def place(self) -> int:
        return len(self._queue)

    def reached(self, place: int) -> bool:
        return self._done >= place

    def run_up_to(self, place: int) -> None:
        while self._done < place:
            self._queue[self._done]()
            self._done += 1


class FakeEvent:
    """A place in a ``FakeStream``."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._place = 0

    def query(self) -> bool:
        return self._stream.reached(self._place)

    def synchronize(self) -> None:
        self._stream.log.append("wait")
        self._stream.run_up_to(self._place)

    def record(self) -> None:
        self._place = self._stream.place()


class FakeKernel:
    """Attends by the page index, after a look at its schedule.

    Args:
        shape: of the launches.
        stream: where its copies queue.
        splits_below: launches of fewer rows are split.
    """

    def __init__(self, shape: Shape, stream: FakeStream, *, splits_below: int = 4) -> None:
        self.shape = shape
        self.stream = stream
        self.splits_below = splits_below
        self.extra = 0
        """Added to the offsets of plans, as by a FlashInfer that plans otherwise."""
        self.plans: list[tuple[HostBuffers, torch.Tensor, int, bool]] = []

    def plan(
        self,
        workspace: Workspace,
        host: HostBuffers,
        num_rows: int,
        num_tokens: int,
        *,
        graph: bool,
    ) -> Sequence[int]:
        self.stream.log.append("plan")
        self.plans.append((host, workspace.ints, num_rows, graph))
        lengths = host.kv_lens[:num_rows].clone()
        written = host.schedule.view(torch.int32)
        written[:num_rows] = lengths
        device = workspace.ints.view(torch.int32)
        self.stream.put(lambda: device[:num_rows].copy_(written[:num_rows]))
        pages = -(-lengths // self.shape.page_size)
        assert host.kv_indptr[: num_rows + 1].tolist() == [0, *pages.cumsum(0).tolist()]
        assert num_tokens == int(host.qo_indptr[num_rows])
        split = num_rows < self.splits_below
        return [num_rows + self.extra, graph, split]

    def bind(self, workspace: Workspace, plan_info: Sequence[int], index: PageIndex) -> Run:
        rows = plan_info[0] - self.extra
        behind = self.stream.place()

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
        ) -> None:
            self.stream.run_up_to(behind)
            scheduled = workspace.ints.view(torch.int32)[:rows].tolist()
            pages = (index.kv_indptr[1:] - index.kv_indptr[:-1] - 1).tolist()
            page = self.shape.page_size
            lens = [n * page + last for n, last in zip(pages, index.last_page_lens, strict=True)]
            assert scheduled == lens, "the schedule is another launch's"
            for row, length in enumerate(lens):
                tokens = slice(int(index.qo_indptr[row]), int(index.qo_indptr[row + 1]))
                own = index.indices[int(index.kv_indptr[row]) : int(index.kv_indptr[row + 1])]
                keys, values = (part[own.long()].flatten(0, 1)[: int(length)] for part in (k, v))
                out[tokens] = _attend(q[tokens], keys, values, scale)

        return run

    def never_splits(self, num_rows: int) -> bool:
        return num_rows >= self.splits_below


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Fakes:
    """A backend on fake kernels, and all that they noted."""

    def __init__(self, context: AttentionContext) -> None:
        self.shape = Shape(
            num_q_heads=context.num_q_heads,
            num_kv_heads=context.num_kv_heads,
            head_dim=context.head_dim,
            page_size=context.page_size,
            num_sms=132,
        )
        self.stream = FakeStream()
        self.prefill = FakeKernel(self.shape, self.stream)
        self.decode = FakeKernel(self.shape, self.stream)
        self.backend = FlashInferBackend(
            context,
            self.shape,
            Kernels(self.prefill, {"tensor": self.decode}),
            torch.zeros(64, dtype=torch.uint8),
            lambda: FakeEvent(self.stream),
        )


class RecordedModule:
    """A module of FlashInfer 0.6.12 by its signatures alone: it notes arguments by name."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.planned: dict[str, Any] = {}
        self.ran: dict[str, Any] = {}

    def plan(self, *arguments: Any) -> list[int]:
        names = DECODE_PLAN if self.template == "decode" else PREFILL_PLAN
        if self.template == "fa2":
            names = (*names, "fixed_split_size", "disable_split_kv", "num_colocated_ctas")
        self.planned = dict(zip(names, arguments, strict=True))
        return [1, 2, 3]

    def paged_run(self, *arguments: Any) -> None:
        self.ran = dict(zip(PREFILL_RUN, arguments, strict=True))

    def run(self, *arguments: Any) -> None:
        self.ran = dict(zip(DECODE_RUN, arguments, strict=True))


_WORKSPACES = ("float_workspace", "int_workspace", "pinned_int_workspace")

# csrc/batch_prefill.cu and batch_prefill_sm90.cu: BatchPrefillWithKVCache[SM90]Plan.
PREFILL_PLAN = (
    *_WORKSPACES,
    *("qo_indptr", "kv_indptr", "kv_len_arr", "total_num_rows", "batch_size", "num_qo_heads"),
    *("num_kv_heads", "page_size", "enable_cuda_graph", "head_dim_qk", "head_dim_vo", "causal"),
    "window_left",
)

# csrc/batch_decode.cu: BatchDecodeWithPagedKVCachePlan.
DECODE_PLAN = (
    *_WORKSPACES,
    *("kv_indptr", "batch_size", "num_qo_heads", "num_kv_heads", "page_size"),
    *("enable_cuda_graph", "window_left", "logits_soft_cap", "head_dim_qk", "head_dim_vo"),
    *("empty_q_data", "empty_kv_data"),
)

# prefill.py: paged_run of get_batch_prefill_module, up to its last argument without a default.
PREFILL_RUN = (
    *("float_workspace", "int_workspace", "plan_info", "q", "k", "v", "qo_indptr", "kv_indptr"),
    *("kv_indices", "kv_last_page_len", "o", "maybe_lse", "mask_mode", "layout", "window_left"),
    *("enable_pdl", "maybe_custom_mask", "maybe_mask_indptr", "maybe_alibi_slopes"),
    *("maybe_prefix_len_ptr", "maybe_token_pos_in_items_ptr", "maybe_max_item_len_ptr"),
    *("logits_soft_cap", "sm_scale", "scale_q", "scale_k", "scale_v", "rope_scale", "rope_theta"),
    *("token_pos_in_items_len", "workspace_size"),
)

# decode.py: run_batch_decode of get_batch_decode_module.
DECODE_RUN = (
    *("float_workspace", "int_workspace", "plan_info", "q", "k", "v", "kv_indptr", "kv_indices"),
    *("kv_last_page_len", "o", "maybe_lse", "layout", "window_left", "enable_pdl"),
    *("alibi_slopes", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta"),
)
