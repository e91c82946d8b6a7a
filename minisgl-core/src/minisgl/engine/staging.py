"""Staging buffers: packed plans in host memory, on their way to a device or to other ranks."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from minisgl.engine.plan import BatchPlan, IntArray
from minisgl.engine.plan_codec import encode_plan, plan_words

DEPTH: Final = 4
"""Buffers in turn. Two steps may be unprocessed, and before them two launches may have failed, for
whose result nobody waits (a third failure in a row ends the scheduler)."""

_INITIAL_WORDS: Final = 1 << 10
"""A buffer that is too small for a plan doubles, and stays so: that ends after a few steps."""


class PlanStager:
    """Packs plans into a ring of preallocated buffers; nothing is allocated in steady state.

    A buffer is written again ``DEPTH`` plans later. By then the result of its step, or of one
    after it, has been processed, so whoever copies from it has finished.

    Args:
        pin: page-locked memory, from which a GPU copies while the host goes on.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._tensors = [self._allocate(_INITIAL_WORDS) for _ in range(DEPTH)]
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
