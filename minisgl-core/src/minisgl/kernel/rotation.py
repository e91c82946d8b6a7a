"""The rotary tables of one launch, shared by all its layers."""

import torch


class Rotation:
    """Where each token of a launch stands in the rotary tables.

    Made once a launch and handed to every layer. Kernels that index the table themselves read
    ``positions`` and ``cos_sin``; the torch reference asks for ``rows``, which are gathered once.

    Attributes:
        positions: ``[T]`` int64: rows of ``cos_sin``.
        cos_sin: float32 ``[max_positions, rotary_dim]``, cosines first, then sines, each of
            ``rotary_dim / 2``: the half-split ("NeoX") layout.
    """

    __slots__ = ("_rows", "cos_sin", "positions")

    def __init__(self, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        self.positions = positions
        self.cos_sin = cos_sin
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(cos, cos)`` and ``(-sin, sin)`` of every token, each ``[T, 1, rotary_dim]`` float32.

        With them a rotation is ``x * first + roll(x, rotary_dim / 2) * second``.
        """
        if self._rows is None:
            cos, sin = self.cos_sin[self.positions].unsqueeze(1).chunk(2, dim=-1)
            self._rows = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
        return self._rows
