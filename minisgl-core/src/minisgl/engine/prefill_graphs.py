"""Prefills of few tokens, launched as CUDA graphs: everything between two layers' attention.

A prefill of some hundred tokens takes the device less time than it takes the host to launch its
kernels. Recorded, they are one launch for each layer beside its attention, which stays eager: it
depends on the lengths of rows, the rest only on the number of tokens. That number is padded to the
next recorded one; padding stores nothing and nobody reads its output. (Piecewise CUDA graphs, as
vLLM records them from a compiled graph; here the pass is cut where the model calls its attention
backend, so any model and any backend that take part in decode graphs can have them.)

Measured on an H200 with 16 tokens: kernel by kernel the host launched a prefill of Qwen3-0.6B in
5.6 ms and of Qwen3-4B in 8.9, like this in 2.1 and 3.0; the device computes them in 1.0 and 3.3.
"""

import bisect
import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend, AttentionLayerSpec
from minisgl.attention.split import CutPlan, NewKV
from minisgl.engine.graph_runner import CudaGraphs, alias
from minisgl.models.interface import BaseLLMModel

logger = logging.getLogger(__name__)

MAX_SAMPLED = 16
"""Tokens of a recorded prefill whose logits can be had."""

Replay = Callable[[], None]


class PieceRecorder(Protocol):
    """Records device work piece by piece; all pieces run in the order of their recording."""

    def begin(self) -> None:
        """Start a piece."""

    def end(self) -> Replay:
        """Return what runs the piece again."""

    def give_up(self) -> None:
        """End a piece that failed, if one has begun."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` without keeping its memory from later pieces."""

    def forget(self) -> None:
        """Give back the memory of everything recorded."""


class CudaPieceRecorder(CudaGraphs):
    """Records a graph a piece, on the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Start a graph."""
        self._begun = torch.cuda.CUDAGraph()
        self._begun.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """End it."""
        graph, self._begun = self._begun, None
        assert graph is not None, "a piece has begun"
        graph.capture_end()
        self._graphs.append(graph)
        return graph.replay

    def give_up(self) -> None:
        """End a graph whose recording failed."""
        graph, self._begun = self._begun, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory, which goes back to the pool."""
        return alias(tensor)


@dataclass(slots=True)
class _Cut:
    """What runs before one layer's attention, what it is given, and where its output goes."""

    replay: Replay
    layer: AttentionLayerSpec
    q: torch.Tensor
    new_kv: NewKV
    out: torch.Tensor


@dataclass(slots=True)
class _Recorded:
    """The pieces of one number of tokens."""

    cuts: list[_Cut] = field(default_factory=list)
    last: Replay | None = None
    logits: torch.Tensor | None = None


class _Recording:
    """A pass that is being recorded: a ``Seam``."""

    def __init__(self, recorder: PieceRecorder) -> None:
        self.recorded = _Recorded()
        self._recorder = recorder

    def cut(self, q: torch.Tensor, layer: AttentionLayerSpec, new_kv: NewKV) -> torch.Tensor:
        """End the piece before this layer's attention and begin the one behind it."""
        recorder = self._recorder
        replay = recorder.end()
        recorder.begin()
        out = torch.empty_like(q)
        kept = None if new_kv is None else (recorder.keep(new_kv[0]), recorder.keep(new_kv[1]))
        self.recorded.cuts.append(_Cut(replay, layer, recorder.keep(q), kept, recorder.keep(out)))
        return out


class _Rehearsal:
    """A pass for all that happens the first time: a ``Seam`` that lets attention out."""

    def cut(self, q: torch.Tensor, layer: AttentionLayerSpec, new_kv: NewKV) -> torch.Tensor:  # noqa: ARG002
        """Return zeros."""
        return torch.zeros_like(q)


class PrefillGraphs:
    """Records and replays prefills of few tokens.

    Args:
        model: whose forward pass is recorded; it attends through ``attention``.
        attention: cuts the pass of a batch whose plan is a ``CutPlan``; see ``SplitBackend``.
        sizes: numbers of tokens to record.
        device: of everything.
        recorder: how; CUDA graphs unless a test says otherwise.
    """

    def __init__(
        self,
        model: BaseLLMModel,
        attention: AttentionBackend,
        sizes: Sequence[int],
        device: torch.device,
        recorder: PieceRecorder | None = None,
    ) -> None:
        self.sizes = sorted(sizes)
        self._model = model
        self._attention = attention
        self._recorder = recorder or CudaPieceRecorder()
        self._tokens = torch.zeros((3, self.sizes[-1]), dtype=torch.int64, device=device)
        self._tokens[2] = -1  # slots: nothing is stored
        self._sampled = torch.zeros(MAX_SAMPLED, dtype=torch.int64, device=device)
        self._recorded: dict[int, _Recorded] = {}

    def record(self, progress: Callable[[Sequence[int]], Iterable[int]]) -> None:
        """Record all sizes, the largest first: the others fit into its memory."""
        with _without_collector():
            for size in progress(self.sizes[::-1]):
                self._recorded[size] = self._record(size)

    def forget(self) -> None:
        """Drop all graphs and give their memory back."""
        self._recorded.clear()
        self._recorder.forget()

    def fits(self, batch: Batch) -> bool:
        """Whether ``run`` can compute this launch."""
        return (
            not batch.num_decode_rows
            and batch.num_tokens <= self.sizes[-1]
            and batch.sample_indices is not None
            and len(batch.sample_indices) <= MAX_SAMPLED
        )

    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits ``[S, vocab]`` of a launch, valid until the next one.

        Args:
            batch: planned; ``fits`` it.
        """
        num_tokens = batch.num_tokens
        size = self.sizes[bisect.bisect_left(self.sizes, num_tokens)]
        recorded = self._recorded[size]
        assert batch.sample_indices is not None, "a prefill names its rows"
        assert recorded.last is not None
        assert recorded.logits is not None
        parts = (batch.input_ids, batch.positions, batch.slots)
        torch.stack(parts, out=self._tokens[:, :num_tokens])
        self._tokens[2, num_tokens:size] = -1
        num_sampled = len(batch.sample_indices)
        self._sampled[:num_sampled] = batch.sample_indices
        self._sampled[num_sampled:] = 0
        for cut in recorded.cuts:
            cut.replay()
            new_kv = cut.new_kv
            if new_kv is not None:
                new_kv = new_kv[0][:num_tokens], new_kv[1][:num_tokens]
            out = self._attention.attend(cut.q[:num_tokens], cut.layer, batch.plan, new_kv)
            cut.out[:num_tokens] = out
        recorded.last()
        return recorded.logits[:num_sampled]

    def _record(self, size: int) -> _Recorded:
        self._model.forward(self._batch(size, CutPlan(_Rehearsal())))
        recording = _Recording(self._recorder)
        batch = self._batch(size, CutPlan(recording))
        self._recorder.begin()
        try:
            logits = self._model.forward(batch)
            recording.recorded.last = self._recorder.end()
        except BaseException:
            self._recorder.give_up()
            raise
        recording.recorded.logits = self._recorder.keep(logits)
        return recording.recorded

    def _batch(self, size: int, plan: Any) -> Batch:
        """Return a launch of one row with so many tokens; what attention reads is of no account."""
        one = np.full(1, size, dtype=np.int32)
        nothing = torch.zeros(1, dtype=torch.int64, device=self._tokens.device)
        return Batch(
            input_ids=self._tokens[0, :size],
            positions=self._tokens[1, :size],
            slots=self._tokens[2, :size],
            sample_indices=self._sampled,
            rows=nothing,
            num_decode_rows=0,
            query_lens=one,
            kv_lens=one,
            kv_lens_device=nothing.int(),
            page_table=nothing.int().view(1, 1),
            page_size=1,
            plan=plan,
        )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep garbage where it is: destroying another engine's graph would break a recording."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def prefill_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens to record graphs for: above 64, each a fifth more or less."""
    steps = (16, *(step << power for power in range(12) for step in (32, 40, 48, 56)))
    sizes = {size for size in steps if size < max_tokens and size % 16 == 0}
    return sorted(sizes | {max_tokens})
