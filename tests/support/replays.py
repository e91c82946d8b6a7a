"""Recorded decode steps without a GPU: what would be a graph is run again as it is."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionContext, AttentionLayerSpec
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.engine.engine import Engine
from minisgl.engine.graph_runner import GraphRunner, Replay, Step
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


def replay_decode_steps(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> EagerRecorder:
    """Make every engine built from now on replay decode steps of up to ``max(sizes)`` rows."""
    recorder = EagerRecorder()

    def make_runner(
        settings: Settings, model: BaseLLMModel, context: BuildContext, engine: Engine
    ) -> GraphRunner:
        return GraphRunner(model, context.attention, engine.state, sizes, recorder)

    monkeypatch.setattr("minisgl.bootstrap.engine.make_runner", make_runner)
    monkeypatch.setattr("minisgl.engine.engine.RowState", partial(RowState, inbox=True))
    monkeypatch.setattr("minisgl.attention.torch_backend.TorchAttentionBackend", ReplayableBackend)
    return recorder
