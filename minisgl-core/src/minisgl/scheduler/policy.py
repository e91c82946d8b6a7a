"""Who gets a step: the rows that decode, the prompts that wait, or both."""

from abc import ABC, abstractmethod
from typing import Final, Literal

PolicyName = Literal["decode-first", "prefill-first"]

MAX_PAUSE: Final = 8
"""Steps in a row that ``prefill-first`` may leave decode rows out of."""


class SchedulingPolicy(ABC):
    """Shares each step between decode rows and prompts; the scheduler asks once a step.

    Decode rows are launched all or none.

    Args:
        max_step_tokens: token budget of a step.
        page_size: tokens a page; a prompt gets so many in every step in which it has room.
    """

    def __init__(self, max_step_tokens: int, page_size: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._page_size = page_size

    @abstractmethod
    def prefill_budget(self, num_decode_rows: int, num_prompts: int) -> int:
        """Return how many prompt tokens the next step may compute, at least one page.

        Args:
            num_decode_rows: rows that could decode.
            num_prompts: requests that wait, or whose prompt is not fully launched.
        """

    @abstractmethod
    def runs_decode(self, num_decode_rows: int, num_chunks: int) -> bool:
        """Return whether the step runs its decode rows too, now that its chunks are known."""


class DecodeFirst(SchedulingPolicy):
    """Every step runs all decode rows, and prompts with what they leave of the budget.

    A row that decodes waits for no step; a prompt that has room gets at least a page a step.
    """

    def prefill_budget(self, num_decode_rows: int, num_prompts: int) -> int:  # noqa: ARG002
        """Return what the decode rows leave, at least one page."""
        return max(self._max_step_tokens - num_decode_rows, self._page_size)

    def runs_decode(self, num_decode_rows: int, num_chunks: int) -> bool:  # noqa: ARG002
        """Always."""
        return True


class PrefillFirst(SchedulingPolicy):
    """While prompts wait and fit, steps are theirs alone, so that decode batches grow large.

    Decode rows are left out of at most ``max_pause`` steps in a row; the step after those is
    shared as ``DecodeFirst`` shares it. A prompt that has room gets at least a page a step.
    """

    def __init__(self, max_step_tokens: int, page_size: int, max_pause: int = MAX_PAUSE) -> None:
        super().__init__(max_step_tokens, page_size)
        self._max_pause = max_pause
        self._paused = 0

    def prefill_budget(self, num_decode_rows: int, num_prompts: int) -> int:
        """Return the whole budget, or what decode rows leave when it is their turn."""
        pauses = bool(num_prompts) and self._paused < self._max_pause
        left = self._max_step_tokens - (0 if pauses else num_decode_rows)
        return max(left, self._page_size)

    def runs_decode(self, num_decode_rows: int, num_chunks: int) -> bool:
        """Not while there are chunks, unless the rows have waited long enough."""
        if num_decode_rows and num_chunks and self._paused < self._max_pause:
            self._paused += 1
            return False
        self._paused = 0
        return True


def make_policy(name: PolicyName, max_step_tokens: int, page_size: int) -> SchedulingPolicy:
    """Return the policy that ``scheduler.policy`` names."""
    kinds: dict[PolicyName, type[SchedulingPolicy]] = {
        "decode-first": DecodeFirst,
        "prefill-first": PrefillFirst,
    }
    return kinds[name](max_step_tokens, page_size)
