"""One device's engine: applies plans to its row state, runs the model, samples."""

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend
from minisgl.engine.batch_builder import build_batch
from minisgl.engine.host_mirror import HostMirror, Launch
from minisgl.engine.info import EngineInfo
from minisgl.engine.plan import CHUNK, ROW_PARAMS, BatchPlan, IntArray
from minisgl.engine.plan_codec import PlanLayout, decode_plan
from minisgl.engine.row_state import RowState
from minisgl.engine.sampler import SamplingTensors, sample
from minisgl.engine.staging import PlanStager
from minisgl.models.interface import BaseLLMModel


class StepHandle:
    """A launched step; ``tokens`` waits for it.

    Args:
        tokens: int64 ``[S]`` on the device: all launches' tokens, one after the other.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tokens = tokens.int()
        if tokens.is_cuda:
            # Copied behind this step and waited for by its own event: later steps may run on.
            on_host = torch.empty(tokens.shape, dtype=torch.int32, pin_memory=True)
            self._tokens = on_host.copy_(self._tokens, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def tokens(self) -> npt.NDArray[np.int32]:
        """Return the sampled tokens, int32 ``[S]``: of the decode rows, then of sampled chunks."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[np.int32] = self._tokens.numpy()
        return array


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
        self._stager = PlanStager(pin=device.type == "cuda")
        self._mirror = HostMirror(info.max_running_requests)
        self._state = RowState(info.max_running_requests, info.max_seq_len, info.page_size, device)
        self._next_plan = 0

    def forward_batch(self, plan: BatchPlan) -> StepHandle:
        """Pack ``plan``, apply it and launch its forward passes; returns at once.

        Raises:
            Exception: whatever the model or a backend raises; the row state is consistent then
                (the plan is applied), and the step's tokens do not exist.
        """
        return self.forward_packed(self._stager.stage(plan), plan)

    def forward_packed(self, words: IntArray, plan: BatchPlan | None = None) -> StepHandle:
        """Do the same for a plan that is packed already, as another rank sent it.

        Args:
            words: int32; left as they are until the step's tokens have been read.
            plan: what ``words`` hold, where it is at hand.
        """
        layout = PlanLayout.of(words)
        plan = plan or decode_plan(words, layout)
        assert plan.number == self._next_plan, "plans are applied in order, each once"
        self._next_plan += 1
        with torch.inference_mode():
            launches = self._mirror.apply(plan)
            chunks = self._state.apply(words, layout)
            slot = plan.number % 2
            # All lengths advance before anything can fail: the state stays that of the plan.
            batches = [build_batch(launch, chunks, self._state) for launch in launches]
            tokens = [
                self._launch(launch, batch, slot)
                for launch, batch in zip(launches, batches, strict=True)
            ]
            return StepHandle(tokens[0] if len(tokens) == 1 else torch.cat(tokens))

    def check_alive(self) -> None:
        """Nothing can be lost: the engine lives in this process."""

    def close(self) -> None:
        """There is nothing to stop: the engine lives in this process."""

    def warm_up(self) -> None:
        """Run one token of the padding row, so that no request pays for first-time work."""
        row = self.info.max_running_requests
        plan = BatchPlan(
            number=0,
            added=np.zeros(1, dtype=ROW_PARAMS),
            chunks=np.array([(row, 0, 1, 1)], dtype=CHUNK),
            token_ids=np.zeros(1, dtype=np.int32),
        )
        plan.added["row"] = row
        self.forward_batch(plan).tokens()
        self._next_plan = 0

    def _launch(self, launch: Launch, batch: Batch, slot: int) -> torch.Tensor:
        """Return the sampled tokens of one forward pass, int64 ``[S]``."""
        batch.plan = self._attention.plan(batch, slot)
        logits = self._model.forward(batch)
        for place, token_ids in self._mirror.banned(launch):
            logits[place, torch.from_numpy(token_ids.astype(np.int64))] = float("-inf")
        rows = batch.rows
        if launch.sampled is not None:
            places = torch.from_numpy(launch.sampled.nonzero()[0])
            rows = rows[places.to(rows.device, non_blocking=True)]
        tokens = sample(logits, self._sampling(launch, rows))
        self._state.last_token[rows] = tokens
        return tokens

    def _sampling(self, launch: Launch, rows: torch.Tensor) -> SamplingTensors:
        state, mirror, host_rows = self._state, self._mirror, launch.sampled_rows
        return SamplingTensors(
            temperature=state.temperature[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            min_p=state.min_p[rows],
            seed=state.seed[rows],
            positions=state.lengths[rows],
            all_greedy=not mirror.temperature[host_rows].any(),
            filtered=mirror.filtered[host_rows],
        )
