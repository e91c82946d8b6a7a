"""Log-probabilities that a step reports, on the host; plain data, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Log-probabilities of ``n`` tokens, on the host; see ``minisgl.kernel.controls``.

    Attributes:
        chosen: float32 ``[n]``.
        ranks: int32 ``[n]``.
        top_ids: int32 ``[n, k]``, best first.
        top_values: float32 ``[n, k]``.
    """

    chosen: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_values: npt.NDArray[np.float32]

    def __getitem__(
        self, some: "slice | npt.NDArray[np.int64] | npt.NDArray[np.bool_]"
    ) -> "LogprobArrays":
        """Return those of some of the tokens."""
        return LogprobArrays(
            self.chosen[some], self.ranks[some], self.top_ids[some], self.top_values[some]
        )


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Of sampled tokens.

    Attributes:
        places: int64 ``[n]``, ascending: which of the step's tokens.
        arrays: as many alternatives as any of them wants.
    """

    places: npt.NDArray[np.int64]
    arrays: LogprobArrays


@dataclass(frozen=True, slots=True)
class PromptLogprobsPart:
    """Of a chunk of a prompt.

    Attributes:
        row: of the table.
        start: the first token's position in the prompt, from 1.
        arrays: of the tokens from there on.
    """

    row: int
    start: int
    arrays: LogprobArrays


@dataclass(frozen=True, slots=True)
class StepReports:
    """All that a step reports beside its tokens."""

    sampled: Sequence[SampledLogprobs] = ()
    prompts: Sequence[PromptLogprobsPart] = ()


NO_REPORTS: Final = StepReports()
