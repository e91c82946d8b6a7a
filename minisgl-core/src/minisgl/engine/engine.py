"""One device's engine: applies plans to its row state, runs the model, samples."""

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend
from minisgl.engine.batch_builder import build_batch
from minisgl.engine.plan import BatchPlan, LaunchPlan
from minisgl.engine.row_state import RowState
from minisgl.engine.sampler import SamplingTensors, sample
from minisgl.models.interface import BaseLLMModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What scheduler, server and users need to know about a running engine.

    Attributes:
        architecture: of the model.
        device, dtype: where and in what it runs.
        vocab_size: ids of prompts and outputs lie below it.
        eos_token_ids: tokens that end a text, all of the model's.
        max_seq_len: most tokens of a request, prompt and output together.
        max_running_requests: rows.
        page_size: tokens a page.
        num_pages: pages in the pool, without the dummy page.
        mixed_launches: decode and prefill rows share one forward pass.
        asynchronous: launches return before they are computed, so overlapping host work pays.
    """

    architecture: str
    device: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_seq_len: int
    max_running_requests: int
    page_size: int
    num_pages: int
    mixed_launches: bool
    asynchronous: bool


class StepHandle:
    """A launched step; ``tokens`` waits for it."""

    def __init__(self, tokens: list[torch.Tensor]) -> None:
        self._tokens = tokens

    def tokens(self) -> list[npt.NDArray[np.int32]]:
        """Return each launch's sampled tokens, int32 ``[S]``, in the order of its sampled rows."""
        return [tokens.cpu().numpy().astype(np.int32) for tokens in self._tokens]


class Engine:
    """Launches steps in the order of their plans.

    Args:
        model: built and filled.
        attention: the backend that the model's layers call.
        info: the engine's facts.
        device: where the row state lives.
    """

    def __init__(
        self,
        model: BaseLLMModel,
        attention: AttentionBackend,
        info: EngineInfo,
        device: torch.device,
    ) -> None:
        self.info = info
        self._model = model
        self._attention = attention
        self._state = RowState(info.max_running_requests, info.max_seq_len, info.page_size, device)
        self._next_plan = 0

    def forward_batch(self, plan: BatchPlan) -> StepHandle:
        """Apply ``plan`` and launch its forward passes; returns at once.

        Raises:
            Exception: whatever the model or a backend raises; the row state is consistent then
                (the plan is applied), and the step's tokens do not exist.
        """
        assert plan.number == self._next_plan, "plans are applied in order, each once"
        self._next_plan += 1
        with torch.inference_mode():
            self._state.apply(plan)
            slot = plan.number % 2
            return StepHandle([self._launch(launch, slot) for launch in plan.launches])

    def check_alive(self) -> None:
        """Nothing can be lost: the engine lives in this process."""

    def close(self) -> None:
        """There is nothing to stop: the engine lives in this process."""

    def warm_up(self) -> None:
        """Run one decode row of the dummy page, so that no request pays for first-time work."""
        launch = LaunchPlan(
            rows=np.array([self.info.max_running_requests], dtype=np.int32),
            num_decode_rows=1,
            starts=np.zeros(1, dtype=np.int32),
            query_lens=np.ones(1, dtype=np.int32),
            token_ids=np.empty(0, dtype=np.int32),
            sampled=np.ones(1, dtype=np.bool_),
        )
        with torch.inference_mode():
            self._launch(launch, slot=0)

    def _launch(self, launch: LaunchPlan, slot: int) -> torch.Tensor:
        batch = build_batch(launch, self._state, self.info.page_size)
        batch.plan = self._attention.plan(batch, slot)
        logits = self._model.forward(batch)
        for place, token_ids in launch.banned:
            logits[place, torch.from_numpy(token_ids.astype(np.int64))] = float("-inf")
        rows = batch.rows[torch.from_numpy(launch.sampled).to(batch.rows.device)]
        tokens = sample(logits, self._sampling(launch, batch, rows))
        self._state.last_token[rows] = tokens
        return tokens

    def _sampling(self, launch: LaunchPlan, batch: Batch, rows: torch.Tensor) -> SamplingTensors:
        state = self._state
        host_rows = launch.rows[launch.sampled]
        ends = torch.from_numpy(batch.kv_lens[launch.sampled].astype(np.int64))
        return SamplingTensors(
            temperature=state.temperature[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            min_p=state.min_p[rows],
            seed=state.seed[rows],
            positions=ends.to(rows.device),
            all_greedy=not state.host_temperature[host_rows].any(),
            filtered=state.host_filtered[host_rows] & (state.host_temperature[host_rows] > 0),
        )
