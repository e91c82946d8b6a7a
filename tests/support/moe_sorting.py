"""Checks of assignments sorted by expert, against a stable sort of torch's."""

import torch

from minisgl_moe_triton.kernels.routing import Routed, sort_by_expert


def check_sort(
    device: str, tokens: int, top_k: int, held: range, experts: int, tile_rows: int, skew: float
) -> None:
    """Sort what a router chose, of which some are here, and check rows and tiles.

    Args:
        device: to sort on.
        tokens, top_k: of the router.
        held: experts that are here.
        experts: of the whole layer.
        tile_rows: of a tile.
        skew: share of the assignments that go to the first held expert.
    """
    random = torch.Generator().manual_seed(tokens + tile_rows)
    chosen = torch.randint(-1, experts, (tokens, top_k), generator=random, dtype=torch.int32)
    chosen[torch.rand(tokens, top_k, generator=random) < skew] = held.start
    routed = Routed(chosen.to(device), torch.zeros(tokens, top_k, device=device), held.start)
    found = sort_by_expert(routed, len(held), tile_rows)

    flat = chosen.flatten().tolist()
    rows = [place for one in held for place, expert in enumerate(flat) if expert == one]
    assert found.order[: len(rows)].tolist() == rows
    tiles, begin = [], 0
    for number, one in enumerate(held):
        end = begin + flat.count(one)
        tiles += [(number, row, end) for row in range(begin, end, tile_rows)]
        begin = end
    number, *entries = found.tiles[: 1 + 3 * len(tiles)].tolist()
    assert number == len(tiles) <= found.most
    assert list(zip(entries[::3], entries[1::3], entries[2::3], strict=True)) == tiles


SORTS = [
    (1, 8, range(128), 128, 16, 0.0),
    (256, 8, range(128), 128, 32, 0.0),
    (512, 8, range(64, 128), 128, 16, 0.2),  # the most for one kernel
    (513, 8, range(128), 128, 64, 0.0),
    (4097, 2, range(8), 8, 128, 0.9),
    (1500, 6, range(20, 33), 60, 16, 0.0),
    (5000, 1, range(1), 1, 16, 1.0),
    (700, 8, range(300), 300, 16, 0.1),  # more experts than there are chunks
]
"""Arguments of ``check_sort`` behind the device."""
