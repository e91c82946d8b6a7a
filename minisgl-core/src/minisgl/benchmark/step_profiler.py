"""Records a few decode steps in the middle of a round with torch's profiler."""

from pathlib import Path
from typing import Final

from torch.profiler import ProfilerActivity, profile, schedule

from minisgl.engine.graph_runner import GraphRunner, ReplayTimer
from minisgl.errors import SettingsError
from minisgl.llm import GenerationProgress

_STEPS_BEFORE: Final = 8
"""Steps between the last prompt's first token and the profiler's start: the pipeline is full."""

_STEPS_TIMED: Final = 40
"""Steps before the profiler's during which CUDA events measure the pauses between graphs."""

_STEPS_OF_WARM_UP: Final = 3
"""Steps that the profiler runs without recording: its own start takes seconds on a GPU."""


class StepProfiler:
    """Records once every prompt has its first token; to be called after each step of a round.

    On a GPU only what runs on the device and the calls that launch it are recorded: recording
    every operation of the host makes the host several times slower, and the gaps that it leaves
    on the device would be the profiler's.

    Args:
        path: where the chrome trace goes; ``.gz`` compresses it.
        num_steps: to record.
        on_gpu: whether the steps run there.
        host: record the host's operations too.
        graphs: those of the engine, if it has any. The pauses between their replays are measured
            before the profiler starts: it makes the launch of a graph several times slower, so
            that with few rows the device waits for the host as it otherwise would not.

    Attributes:
        pauses_us: between each two replays that were timed.
    """

    def __init__(
        self,
        path: Path,
        num_steps: int,
        *,
        on_gpu: bool = False,
        host: bool = False,
        graphs: GraphRunner | None = None,
    ) -> None:
        self._graphs = graphs
        self.pauses_us: list[float] = []
        self._path = path
        self._num_steps = num_steps
        self._activities = [ProfilerActivity.CUDA] if on_gpu else []
        if host or not on_gpu:
            self._activities.append(ProfilerActivity.CPU)
        self._num_seen = 0
        self._profile: profile | None = None
        self.is_written = False
        self.num_running = 0

    def __call__(self, progress: GenerationProgress) -> None:
        """Take note of a step."""
        if progress.num_started < progress.num_prompts or self.is_written:
            return
        self._num_seen += 1
        if self._profile is not None:
            self._profile.step()
        elif self._graphs is not None and self._num_seen == _STEPS_BEFORE:
            self._graphs.timer = ReplayTimer(_STEPS_TIMED)
        elif self._num_seen > self._steps_before:
            if self._graphs is not None and self._graphs.timer is not None:
                self.pauses_us = self._graphs.timer.idle_us()
                self._graphs.timer = None
            self.num_running = progress.num_prompts - progress.num_done
            self._profile = profile(
                activities=self._activities,
                schedule=schedule(wait=0, warmup=_STEPS_OF_WARM_UP, active=self._num_steps),
                on_trace_ready=self._write,
                acc_events=True,
            )
            self._profile.start()

    @property
    def _steps_before(self) -> int:
        """Steps that are over when the profiler starts."""
        return _STEPS_BEFORE + (0 if self._graphs is None else _STEPS_TIMED)

    def close(self) -> None:
        """End the recording.

        Raises:
            SettingsError: the round was over before enough steps could be recorded.
        """
        if self._graphs is not None:
            self._graphs.timer = None
        if self._profile is not None:
            self._profile.stop()
        if not self.is_written:
            needed = self._steps_before + _STEPS_OF_WARM_UP + self._num_steps
            raise SettingsError(
                f"--profile-steps {self._num_steps}: the round ended too early to record them; it "
                f"needs {needed + 1} steps after the last prompt's first token, so give longer "
                "answers (--output-len) or fewer steps"
            )

    def _write(self, finished: profile) -> None:
        finished.export_chrome_trace(str(self._path))
        self.is_written = True
