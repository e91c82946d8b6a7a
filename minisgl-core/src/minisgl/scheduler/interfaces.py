"""What the scheduler asks of its surroundings."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from minisgl.engine.info import EngineInfo
from minisgl.engine.plan import BatchPlan
from minisgl.engine.reports import StepReports
from minisgl.request import RequestStats, StepStats


class StepResult(Protocol):
    """A launched step."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """Wait for the step; returns its tokens, ``[S]``: decode rows, then sampled chunks."""

    def reports(self) -> StepReports:
        """Return the log-probabilities that came with the tokens, which have been read."""


class StepEngine(Protocol):
    """What the scheduler asks of an engine."""

    info: EngineInfo

    def forward_batch(self, plan: BatchPlan) -> StepResult:
        """Launch a step; returns at once. The plan's arrays are not needed afterwards.

        Raises:
            EngineLostError: the engine can serve no more.
            Exception: this step has failed, and the next one may be launched.
        """

    def check_alive(self) -> None:
        """Raise ``EngineLostError`` if the engine can serve no more."""

    def close(self) -> None:
        """Stop what the engine runs outside of this process. Safe to call twice."""


class Observers(Protocol):
    """Who is told about finished steps and requests."""

    @property
    def has_step_observers(self) -> bool:
        """Whether anybody wants ``step_finished``."""

    @property
    def has_request_observers(self) -> bool:
        """Whether anybody wants ``request_finished``; asked once, when the scheduler is made."""

    def step_finished(self, stats: StepStats) -> None:
        """Take note of a step."""

    def request_finished(self, stats: RequestStats) -> None:
        """Take note of a request."""
