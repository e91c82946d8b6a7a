"""FlashInfer's modules behind two methods: plan a launch, bind its arguments.

FlashInfer's public wrappers check, convert and copy at every ``plan``, and put some forty
arguments together at every ``run``. Here ``plan`` calls the planner that a wrapper caches, with
host tensors that exist already, and ``bind`` puts the arguments together once a launch. Arguments
and their order are those of ``BatchDecodeWithPagedKVCacheWrapper`` and
``BatchPrefillWithPagedKVCacheWrapper`` in FlashInfer 0.6.12; a test on a card compares results.

A planner reads lengths on the host, writes its schedule to pinned memory, and copies it to the
device on the current stream. It returns offsets into that memory, which ``run`` takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl_attn_flashinfer.buffers import HostBuffers, PageIndex
from minisgl_attn_flashinfer.modules import Template
from minisgl_attn_flashinfer.sizes import Shape

_NON_CAUSAL, _CAUSAL = 0, 1  # flashinfer.utils.MaskMode
_NHD = 0  # flashinfer.utils.TensorLayout
_NO_WINDOW, _NO_SOFT_CAP = -1, 0.0
_ROPE_SCALE, _ROPE_THETA = 1.0, 1e4  # the wrappers' defaults; read only where a kernel rotates

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Attend one layer: ``run(q, k, v, out, scale)``, K and V being the layer's pool."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory of a plan.

    Attributes:
        floats: uint8, partial results of split rows; all launches may share it, one runs at a time.
        ints: uint8, the schedule; belongs to one plan until its launch has run.
    """

    floats: torch.Tensor
    ints: torch.Tensor


class Kernel(Protocol):
    """What the backend needs of a FlashInfer module."""

    def plan(
        self,
        workspace: Workspace,
        host: HostBuffers,
        num_rows: int,
        num_tokens: int,
        *,
        graph: bool,
    ) -> Sequence[int]:
        """Plan a launch of the lengths in ``host``; asynchronous.

        Args:
            workspace: device memory; its ``ints`` are written on the current stream.
            host: lengths, and pinned memory that is read until that copy has been done.
            num_rows: rows of the launch.
            num_tokens: query tokens of the launch.
            graph: make everything that ``bind`` takes independent of the lengths.
        """
        ...

    def bind(self, workspace: Workspace, plan_info: Sequence[int], index: PageIndex) -> Run:
        """Return the launch as a function of what differs between layers."""
        ...

    def never_splits(self, num_rows: int) -> bool:
        """Whether plans of so many rows are sure to leave every row in one piece."""
        ...


class TensorCoreKernel:
    """FlashInfer's prefill module, ``fa2`` or ``fa3``; ``fa2`` without a mask also decodes."""

    def __init__(
        self, module: Any, template: Template, shape: Shape, *, causal: bool, pdl: bool
    ) -> None:
        self._plan = module.plan
        self._run = module.paged_run
        self._template = template
        self._shape = shape
        self._causal = causal
        self._pdl = pdl

    def plan(
        self,
        workspace: Workspace,
        host: HostBuffers,
        num_rows: int,
        num_tokens: int,
        *,
        graph: bool,
    ) -> Sequence[int]:
        """Plan; see ``Kernel``."""
        shape = self._shape
        arguments: tuple[Any, ...] = (
            workspace.floats,
            workspace.ints,
            host.schedule,
            host.qo_indptr,
            host.kv_indptr,
            host.kv_lens,
            num_tokens,
            num_rows,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.page_size,
            graph,
            shape.head_dim,
            shape.head_dim,
            self._causal,
            _NO_WINDOW,
        )
        if self._template == "fa2":
            arguments += (-1, False, 0)  # no fixed split size, splits allowed, nothing colocated
        info: Sequence[int] = self._plan(*arguments)
        return info

    def bind(self, workspace: Workspace, plan_info: Sequence[int], index: PageIndex) -> Run:
        """Bind; see ``Kernel``."""
        run = self._run
        before = (workspace.floats, workspace.ints, plan_info)
        between = (index.qo_indptr, index.kv_indptr, index.indices, index.last_page_lens)
        mask = _CAUSAL if self._causal else _NON_CAUSAL
        # No log-sums; then masks, slopes, prefixes and positions, all of which are None.
        after = (None, mask, _NHD, _NO_WINDOW, self._pdl, *(None,) * 6, _NO_SOFT_CAP)
        # No scales of fp8, default angles, no positions in items, size of the workspace.
        last = (*(None,) * 3, _ROPE_SCALE, _ROPE_THETA, 0, workspace.floats.numel())

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
        ) -> None:
            run(*before, q, k, v, *between, out, *after, scale, *last)

        return attend

    def never_splits(self, num_rows: int) -> bool:
        """See ``Kernel``: rows beyond the planner's limit of pieces."""
        return num_rows >= self._shape.unsplit_rows


class CudaCoreKernel:
    """FlashInfer's decode module."""

    def __init__(self, module: Any, shape: Shape, dtype: torch.dtype, *, pdl: bool) -> None:
        self._plan = module.plan
        self._run = module.run
        self._shape = shape
        self._pdl = pdl
        self._dtype_sample = torch.empty(0, dtype=dtype)

    def plan(
        self,
        workspace: Workspace,
        host: HostBuffers,
        num_rows: int,
        num_tokens: int,  # noqa: ARG002 - one a row
        *,
        graph: bool,
    ) -> Sequence[int]:
        """Plan; see ``Kernel``."""
        shape = self._shape
        info: Sequence[int] = self._plan(
            workspace.floats,
            workspace.ints,
            host.schedule,
            host.kv_indptr,
            num_rows,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.page_size,
            graph,
            _NO_WINDOW,
            _NO_SOFT_CAP,
            shape.head_dim,
            shape.head_dim,
            self._dtype_sample,
            self._dtype_sample,
        )
        return info

    def bind(self, workspace: Workspace, plan_info: Sequence[int], index: PageIndex) -> Run:
        """Bind; see ``Kernel``."""
        run = self._run
        before = (workspace.floats, workspace.ints, plan_info)
        between = (index.kv_indptr, index.indices, index.last_page_lens)
        # No log-sums, no slopes.
        after = (None, _NHD, _NO_WINDOW, self._pdl, None, _NO_SOFT_CAP)
        last = (_ROPE_SCALE, _ROPE_THETA)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
        ) -> None:
            run(*before, q, k, v, *between, out, *after, scale, *last)

        return attend

    def never_splits(self, num_rows: int) -> bool:  # noqa: ARG002
        """See ``Kernel``: the limit depends on the occupancy, which only the planner knows."""
        return False


def is_split(plan_info: Sequence[int]) -> bool:
    """Whether a decode plan's launch cuts rows into pieces: the last of its numbers."""
    return bool(plan_info[-1])
