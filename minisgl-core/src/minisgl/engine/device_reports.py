"""Log-probabilities that a step reports: on the device, and on their way to the host."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from minisgl.engine.reports import (
    LogprobArrays,
    PromptLogprobsPart,
    SampledLogprobs,
    StepReports,
)
from minisgl.kernel.controls import TokenLogprobs


@dataclass(slots=True)
class ScoredChunk:
    """Prompt tokens of one chunk whose log-probabilities are wanted.

    Attributes:
        row: of the table.
        start: position of the first of them in the prompt.
        num_tokens: how many there are.
    """

    row: int
    start: int
    num_tokens: int


@dataclass(slots=True)
class DeviceReports:
    """What a step's launches report, still on the device.

    Attributes:
        sampled: places of the step's tokens, and their log-probabilities.
        prompts: chunks in their order, and the log-probabilities of all their tokens.
    """

    sampled: list[tuple[npt.NDArray[np.int64], TokenLogprobs]] = field(default_factory=list)
    prompts: list[tuple[list[ScoredChunk], TokenLogprobs]] = field(default_factory=list)

    def to_host(self) -> "DeviceReports":
        """Return the same in pinned memory, once what the stream does next has begun."""
        return DeviceReports(
            [(places, _copied(logprobs)) for places, logprobs in self.sampled],
            [(chunks, _copied(logprobs)) for chunks, logprobs in self.prompts],
        )

    def arrays(self) -> StepReports:
        """Return what ``to_host`` has copied; the copies must have ended."""
        prompts: list[PromptLogprobsPart] = []
        for chunks, logprobs in self.prompts:
            arrays, first = _arrays(logprobs), 0
            for chunk in chunks:
                part = arrays[first : first + chunk.num_tokens]
                prompts.append(PromptLogprobsPart(chunk.row, chunk.start, part))
                first += chunk.num_tokens
        sampled = [SampledLogprobs(places, _arrays(logprobs)) for places, logprobs in self.sampled]
        return StepReports(sampled, prompts)


def _copied(logprobs: TokenLogprobs) -> TokenLogprobs:
    if not logprobs.chosen.is_cuda:
        return logprobs
    return TokenLogprobs(
        *(
            torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            for x in logprobs
        )
    )


def _arrays(logprobs: TokenLogprobs) -> LogprobArrays:
    return LogprobArrays(*(tensor.numpy() for tensor in logprobs))
