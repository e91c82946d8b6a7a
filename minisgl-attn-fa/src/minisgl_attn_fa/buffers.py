"""Index pointers of launches: pinned memory, and when it may be written again."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class CopyEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def synchronize(self) -> None:
        """Wait until all that was recorded has run."""
        ...

    def record(self) -> None:
        """Mark this place of the current stream."""
        ...


class Ends:
    """Where the queries and keys of one slot's rows end.

    A copy from pinned memory runs when its stream gets there, which may be long after the call: so
    the next launch of this slot waits for it, which two steps later is no wait.

    Args:
        most_rows: of one launch.
        device: to copy to.
        make_event: ``torch.cuda.Event``, or a stand-in.
    """

    def __init__(
        self, most_rows: int, device: torch.device, make_event: Callable[[], CopyEvent]
    ) -> None:
        self._most_rows = most_rows
        self._device = device
        self._host = torch.zeros(
            2, most_rows + 1, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._copied = make_event()

    def upload(
        self, query_lens: npt.NDArray[np.int32], kv_lens: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 0 and the running sum of both, int32 ``[R + 1]``, on the device."""
        rows = len(query_lens)
        assert rows <= self._most_rows, f"{rows} rows in a launch, room for {self._most_rows}"
        self._copied.synchronize()
        ends = self._host.view(-1)[: 2 * (rows + 1)].view(2, rows + 1)
        written = ends.numpy()
        written[:, 0] = 0
        np.cumsum(query_lens, out=written[0, 1:])
        np.cumsum(kv_lens, out=written[1, 1:])
        # Memory of its own, from torch's allocator: in the order of the stream, as all launches.
        device = torch.empty(2, rows + 1, dtype=torch.int32, device=self._device)
        device.copy_(ends, non_blocking=True)
        self._copied.record()
        return device[0], device[1]
