"""Which launches ``minisgl tune moe`` tries, the likeliest first. Imports no torch."""

from collections.abc import Iterator
from itertools import product
from typing import Final

from minisgl_moe_triton.configs import Columns, Tile, shared_bytes

MOST_FEW: Final = 2
"""Beyond so many assignments an expert, too many share one to be read once for each."""

GROUPS: Final = (1, 4, 8, 16, 32)

_MOST_ELEMENTS: Final = 128
"""Accumulated by one thread: more do not fit into its registers."""

_MOST_WITH_PARTS: Final = 192
"""The same for products of fp8, with the part of a sum that a tensor core holds."""

_BLOCKS: Final = (1024, 2048, 512, 256)
"""Inputs at once, for few tokens."""

_FOR_FEW_ROWS: Final = (
    (64, 128, 4, 4), (64, 64, 5, 4), (128, 64, 4, 4), (128, 128, 3, 8), (64, 128, 3, 4),
    (64, 256, 2, 4), (128, 64, 5, 8), (64, 256, 3, 4), (128, 128, 3, 4), (64, 64, 7, 4),
    (128, 128, 2, 8), (64, 64, 4, 4), (128, 64, 3, 4), (256, 64, 3, 8), (64, 128, 2, 4),
    (128, 128, 2, 4), (128, 256, 2, 8), (32, 256, 3, 4), (64, 64, 3, 4), (64, 128, 5, 4),
)  # fmt: skip
"""Outputs, inputs, stages, warps."""

_FOR_MANY_ROWS: Final = (
    (128, 64, 4, 8), (128, 64, 3, 8), (64, 64, 4, 4), (256, 64, 3, 8), (256, 64, 4, 8),
    (128, 64, 3, 4), (128, 64, 4, 4), (64, 64, 5, 4), (64, 128, 3, 4), (128, 128, 2, 8),
    (64, 64, 3, 4), (128, 32, 4, 8), (128, 128, 3, 8), (64, 64, 4, 8), (64, 128, 2, 4),
)  # fmt: skip


def tile_rows(mean: float) -> list[int]:
    """Return rows of tiles worth trying for a mean number of tokens an expert, likeliest first."""
    all_rows = (16, 32, 64, 128)
    fitting = next((rows for rows in all_rows if rows >= 1.5 * mean), 128)
    place = all_rows.index(fitting)
    others = [all_rows[other] for other in (place - 1, place + 1) if 0 <= other < len(all_rows)]
    return [fitting, *others]


def tiles(
    rows: int, group: int, shared: int, *, gated: bool, tma: bool, item: int = 2
) -> Iterator[Tile]:
    """Yield how to cut a product.

    Args:
        rows: of a tile.
        group: tiles that are done before the next outputs.
        shared: bytes of shared memory that a program of the device can have.
        gated: two products at once.
        tma: weights are copied by the tensor memory accelerator.
        item: bytes of a weight.
    """
    shapes, orders = (
        (_FOR_FEW_ROWS, (True, False)) if rows < 64 else (_FOR_MANY_ROWS, (False, True))
    )
    for swapped, (outputs, inputs, stages, warps) in product(orders, shapes):
        tile = Tile(
            outputs=outputs, inputs=inputs * 2 // item, group=group, stages=stages, warps=warps,
            swapped=swapped, tma=tma,
        )  # fmt: skip
        sums, most = (2 + gated, _MOST_WITH_PARTS) if item == 1 else (1 + gated, _MOST_ELEMENTS)
        room = shared_bytes(tile, rows, gated=gated, item=item) <= shared
        if room and (outputs >= 64 or not swapped) and rows * outputs * sums <= most * 32 * warps:
            yield tile


def columns(inputs: int, places: int) -> Iterator[Columns]:
    """Yield how to cut a product for few tokens.

    Args:
        inputs: of the weights.
        places: experts that one program sums over, as a power of 2.
    """
    blocks = [block for block in _BLOCKS if block < 2 * inputs] or [_BLOCKS[-1]]
    for outputs, block, warps in product((4, 2, 8, 1, 16), blocks, (8, 4)):
        if 1 <= places * outputs * block // (32 * warps) <= _MOST_ELEMENTS:
            yield Columns(outputs=outputs, inputs=block, warps=warps)
