"""An engine without a device: all the host's work of a step, none of the computation."""

import time

import numpy as np
import numpy.typing as npt

from minisgl.engine.host_mirror import HostMirror
from minisgl.engine.info import EngineInfo
from minisgl.engine.plan import BatchPlan, IntArray
from minisgl.engine.reports import NO_REPORTS, StepReports
from minisgl.engine.staging import PlanStager

VOCAB_SIZE = 151_936
"""Of Qwen3: as large as vocabularies are, because the table of end-of-sequence tokens is too."""


class NullResult:
    """A step whose tokens are there at once."""

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        self._tokens = tokens

    def tokens(self) -> npt.NDArray[np.int32]:
        """Return the tokens, int32 ``[S]``."""
        return self._tokens

    def reports(self) -> StepReports:
        """Return nothing: there are no logits."""
        return NO_REPORTS


class NullEngine:
    """Packs each plan into a staging buffer and advances the host mirror, as a real engine does.

    Attributes:
        staged: copies of the packed plans since ``take_staged``: what a device would have got.
        launched_at, staged_at: times within the last step, in seconds.

    Args:
        rows: requests at once.
        page_size: tokens a page.
        max_seq_len: most tokens of a request.
        num_pages: pages of the pool.
    """

    def __init__(self, *, rows: int, page_size: int, max_seq_len: int, num_pages: int) -> None:
        self.info = EngineInfo(
            architecture="Null",
            device="null",
            dtype="none",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(VOCAB_SIZE - 1,),
            max_seq_len=max_seq_len,
            max_running_requests=rows,
            page_size=page_size,
            num_pages=num_pages,
            mixed_launches=False,
            asynchronous=True,
        )
        self._stager = PlanStager()
        self._mirror = HostMirror(rows)
        self._tokens = np.random.default_rng(0).integers(
            VOCAB_SIZE - 1, size=(7, 2 * rows), dtype=np.int32
        )
        self.staged: list[IntArray] = []
        self.last_plan: BatchPlan | None = None
        self.launched_at = self.staged_at = 0.0

    def forward_batch(self, plan: BatchPlan) -> NullResult:
        """Do the host's part of a step."""
        self.launched_at = time.perf_counter()
        words = self._stager.stage(plan)
        launches = self._mirror.apply(plan)
        num_sampled = sum(len(launch.sampled_rows) for launch in launches)
        self.staged.append(words.copy())  # the copy to the device
        result = NullResult(self._tokens[plan.number % 7, :num_sampled])
        self.last_plan = plan
        self.staged_at = time.perf_counter()
        return result

    def check_alive(self) -> None:
        """It always is."""

    def close(self) -> None:
        """Nothing runs elsewhere."""

    def take_staged(self) -> list[IntArray]:
        """Return and forget what was staged."""
        staged, self.staged = self.staged, []
        return staged
