"""Recorded steps without a GPU: what would be a graph is run again as it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionContext, AttentionLayerSpec
from minisgl.attention.split import SplitBackend
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.engine.engine import Engine
from minisgl.engine.graph_runner import GraphRunner, Replay, Step
from minisgl.engine.prefill_graphs import PrefillGraphs
from minisgl.engine.row_state import RowState
from minisgl.layers.context import BuildContext
from minisgl.models.interface import BaseLLMModel
from minisgl.settings import Settings


class EagerRecorder:
    """Runs the recorded step again; everything that it reads is where it was."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, step: Step) -> tuple[Replay, torch.Tensor]:
        result = step()

        def replay() -> None:
            self.num_replays += 1
            result.copy_(step())

        return replay, result

    def forget(self) -> None:
        """Nothing is kept."""


@dataclass
class _Plan:
    """The kv_lens of the next replay, and what the torch backend makes of them."""

    kv_lens: npt.NDArray[np.int32]
    inner: Any = None


class ReplayableBackend(TorchAttentionBackend):
    """The torch backend with the three moments of a recorded launch."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.cuda_graphs = self

    def prepare_capture(self, batch: Batch) -> _Plan:
        return _Plan(batch.kv_lens.copy())

    def enqueue(self, batch: Batch, plan: _Plan) -> None:
        assert plan.kv_lens.tolist() == batch.kv_lens_device.tolist(), "host and device differ"
        plan.inner = super().plan(replace(batch, kv_lens=plan.kv_lens), 0)

    def prepare_replay(self, plan: _Plan, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        plan.kv_lens = kv_lens.copy()

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: Any,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        inner = plan.inner if isinstance(plan, _Plan) else plan
        return super().attend(q, layer, inner, new_kv)


class _Operations(TorchDispatchMode):
    """Notes every operation of torch, with the tensors that it read and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" not in func.__name__:  # what is in there has been written by somebody else
            self.noted.append((func, args, kwargs or {}, result))
        return result

    def run(self) -> None:
        """Do all of it again, into the same tensors."""
        for func, args, kwargs, result in self.noted:
            again = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and again is not result:
                if again.shape != result.shape:
                    result.resize_(again.shape)
                result.copy_(again)
            elif isinstance(result, (list, tuple)):
                for one, other in zip(result, again, strict=True):
                    one.copy_(other)


class EagerPieces:
    """Runs the operations of a recorded piece again: no Python of the model runs, as in a graph."""

    def __init__(self) -> None:
        self.num_pieces = self.num_replays = self.num_given_up = 0
        self._begun: _Operations | None = None

    def begin(self) -> None:
        assert self._begun is None, "one piece at a time"
        self._begun = _Operations()
        self._begun.__enter__()

    def end(self) -> Callable[[], None]:
        operations, self._begun = self._begun, None
        assert operations is not None
        operations.__exit__(None, None, None)
        self.num_pieces += 1

        def replay() -> None:
            self.num_replays += 1
            operations.run()

        return replay

    def give_up(self) -> None:
        self.num_given_up += 1
        if self._begun is not None:
            self._begun.__exit__(None, None, None)
            self._begun = None

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def forget(self) -> None:
        """Nothing is kept."""


def replay_prefills(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> EagerPieces:
    """Make every engine built from now on replay prefills of up to ``max(sizes)`` tokens."""
    recorder = EagerPieces()

    def make_prefill_graphs(
        settings: Settings, model: BaseLLMModel, context: BuildContext, *, engine: Engine
    ) -> PrefillGraphs:
        return PrefillGraphs(model, context.attention, sizes, context.device, recorder)

    def split(context: AttentionContext) -> SplitBackend:
        return SplitBackend(backend(context))

    replay_decode_steps(monkeypatch, [1, 2, 4, 8])
    backend = ReplayableBackend
    monkeypatch.setattr("minisgl.bootstrap.engine.make_prefill_graphs", make_prefill_graphs)
    monkeypatch.setattr("minisgl.attention.torch_backend.TorchAttentionBackend", split)
    return recorder


def replay_decode_steps(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], shared_sizes: Sequence[int] = ()
) -> EagerRecorder:
    """Make every engine built from now on replay decode steps of up to ``max(sizes)`` rows."""
    recorder = EagerRecorder()

    def make_runner(
        settings: Settings, model: BaseLLMModel, context: BuildContext, engine: Engine
    ) -> GraphRunner:
        return GraphRunner(
            model, context.attention, engine.state, sizes, recorder, shared_sizes=shared_sizes
        )

    monkeypatch.setattr("minisgl.bootstrap.engine.make_runner", make_runner)
    monkeypatch.setattr("minisgl.engine.engine.RowState", partial(RowState, inbox=True))
    monkeypatch.setattr("minisgl.attention.torch_backend.TorchAttentionBackend", ReplayableBackend)
    return recorder
