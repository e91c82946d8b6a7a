"""What the scheduler asks of its surroundings."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from minisgl.engine.engine import EngineInfo
from minisgl.engine.plan import BatchPlan
from minisgl.request import RequestStats, StepStats


class StepResult(Protocol):
    """A launched step."""

    def tokens(self) -> list[npt.NDArray[np.int32]]:
        """Wait for the step; one array of sampled tokens a launch."""


class StepEngine(Protocol):
    """What the scheduler asks of an engine."""

    info: EngineInfo

    def forward_batch(self, plan: BatchPlan) -> StepResult:
        """Launch a step; returns at once.

        Raises:
            EngineLostError: the engine is lost, and with it every request.
            Exception: this step has failed.
        """

    def check_alive(self) -> None:
        """Look whether the engine can still run steps; called while there are none.

        Raises:
            EngineLostError: it cannot.
        """

    def close(self) -> None:
        """Stop what belongs to the engine outside of this process. Safe to call twice."""


class Observers(Protocol):
    """Who is told about finished steps and requests."""

    @property
    def has_step_observers(self) -> bool:
        """Whether anybody wants ``step_finished``."""

    def step_finished(self, stats: StepStats) -> None:
        """Take note of a step."""

    def request_finished(self, stats: RequestStats) -> None:
        """Take note of a request."""
