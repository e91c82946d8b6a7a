"""Between the model and the sampler: what makes some rows' tokens impossible or less likely.

One object an engine, called for the rows of a launch that get a token: ``apply`` changes their
logits before the draw, ``accept`` takes note of the tokens that were drawn. On a GPU a recorded
decode step draws from the model's own logits; the rows that ``concerns`` names are drawn again.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl.engine.host_mirror import HostMirror, RowArray
from minisgl.engine.row_state import RowState

Upload = Callable[[npt.NDArray[np.int64]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """Rows of one launch that get a token.

    Attributes:
        rows: int64 ``[S]`` on the device.
        host_rows: the same on the host.
        ends: int64 ``[S]``, host: tokens of each row, without the one to come.
    """

    rows: torch.Tensor
    host_rows: RowArray
    ends: RowArray


class LogitsProcessing:
    """The steps between logits and the draw, in the order in which they are applied.

    Args:
        mirror: what the host knows about the rows.
        state: what the device knows about them, the masks of the last plan among it.
        upload: brings a small array to the device without waiting for it.
    """

    def __init__(self, mirror: HostMirror, state: RowState, upload: Upload) -> None:
        self._mirror = mirror
        self._state = state
        self._upload = upload

    def concerns(self, rows: RowArray, ends: RowArray) -> npt.NDArray[np.bool_] | None:
        """Return which rows' logits change or are reported, bool ``[S]``; ``None``: no row's.

        Args:
            rows: int64 ``[S]``, host.
            ends: int64 ``[S]``: their lengths.
        """
        mirror = self._mirror
        concerned = mirror.has_bans(rows, ends)
        if mirror.has_masks:
            masked = mirror.mask_places[rows] >= 0
            concerned = masked if concerned is None else concerned | masked
        return concerned

    def apply(self, logits: torch.Tensor, sampled: SampledRows) -> torch.Tensor:
        """Return the logits to draw from, ``[S, vocab]``; may write into ``logits``."""
        for place, token_ids in self._mirror.banned(sampled.host_rows, sampled.ends):
            on_device = self._upload(token_ids.astype(np.int64))
            logits[place].index_fill_(0, on_device, float("-inf"))
        if self._mirror.has_masks:
            self._mask(logits, sampled.host_rows)
        return logits

    def accept(self, tokens: torch.Tensor, sampled: SampledRows) -> None:
        """Take note of the tokens drawn, int64 ``[S]`` on the device."""

    def _mask(self, logits: torch.Tensor, host_rows: RowArray) -> None:
        """Leave those rows that have a mask only the tokens that it names."""
        which = self._mirror.mask_places[host_rows]
        places = (which >= 0).nonzero()[0]
        if len(places):
            assert self._state.masks is not None, "the plan has brought the masks"
            on_device = self._upload(np.stack((places, which[places])))
            self._state.ops.mask_tokens(logits, on_device[0], self._state.masks, on_device[1])
