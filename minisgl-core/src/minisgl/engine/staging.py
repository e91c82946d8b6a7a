"""Staging buffers: packed plans in host memory, on their way to a device or to other ranks."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from minisgl.engine.plan import BatchPlan, IntArray
from minisgl.engine.plan_codec import encode_plan, plan_words
from minisgl.engine.row_state import INBOX_WORDS

DEPTH: Final = 4
"""Buffers in turn. Two steps may be unprocessed, and before them two launches may have failed, for
whose result nobody waits (a third failure in a row ends the scheduler)."""

_INITIAL_WORDS: Final = 1 << 10
"""Of memory that is not page-locked, and so costs nothing to replace."""


def usual_words(num_rows: int, vocab_size: int) -> int:
    """Return the words of the longest usual plan: all that fits the inbox, and a mask a row.

    Longer are plans of many long prompts with penalties, or of long prompts in the prefix cache.

    Args:
        num_rows: requests at once.
        vocab_size: of the model.
    """
    return INBOX_WORDS + 2 + num_rows * (1 - (-vocab_size // 32))


class PlanStager:
    """Packs plans into a ring of preallocated buffers; nothing is allocated in steady state.

    A buffer is written again ``DEPTH`` plans later. By then the result of its step, or of one
    after it, has been processed, so whoever copies from it has finished.

    For a longer plan a buffer is replaced by one of the next power of two, so at most a few dozen
    times in all. Nobody copies from the old one: it would have been written now.

    Args:
        num_words: of a buffer at first.
        pin: page-locked memory, from which a GPU copies while the host goes on. To allocate it
            stops the host and maybe the device, so there should be enough: see ``usual_words``.
    """

    def __init__(self, num_words: int = _INITIAL_WORDS, *, pin: bool = False) -> None:
        self._pin = pin
        self._tensors = [self._allocate(num_words) for _ in range(DEPTH)]
        self._arrays: list[IntArray] = [tensor.numpy() for tensor in self._tensors]

    def stage(self, plan: BatchPlan) -> IntArray:
        """Return ``plan`` packed, int32 ``[words]``: a view of the next buffer."""
        place = plan.number % DEPTH
        needed = plan_words(plan)
        if needed > len(self._arrays[place]):
            self._tensors[place] = self._allocate(1 << (needed - 1).bit_length())
            self._arrays[place] = self._tensors[place].numpy()
        words = self._arrays[place]
        return words[: encode_plan(plan, words)]

    def _allocate(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=self._pin)


def upload(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Bring a small array to a device without waiting for it; on a CPU it is used as it is."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
