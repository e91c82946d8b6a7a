"""Triton's attention in its interpreter: the contract, windows and caps; on a card: tests/gpu."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.attention.triton_backend import TritonAttentionBackend
from minisgl.kernel.triton.attention import choose_splits
from minisgl.testing.attention_contract import AttentionBackendContract
from minisgl.testing.paged_rows import PagedRows, largest_error
from support.interpreter import loops_to_loaded_numbers

__all__ = ["loops_to_loaded_numbers"]


class InInterpreter(AttentionBackendContract):
    mixed_batches = True
    head_dims = (64,)
    num_kv_heads = 1
    num_launches = 6
    graph_sizes = (1, 7)

    def create(self, context: AttentionContext) -> AttentionBackend:
        return TritonAttentionBackend(context)


class TestBfloat16(InInterpreter):
    dtype = torch.bfloat16
    page_sizes = (16,)
    groups = (5,)


class TestFloat32(InInterpreter):
    page_sizes = (1,)
    groups = (1,)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(("window", "cap"), [(1, None), (7, None), (64, 2.0), (None, 0.5)])
def test_windows_and_caps_are_those_of_the_reference(
    window: int | None, cap: float | None, head_dim: int
) -> None:
    lengths = [1, 40, 90, 133]
    rows = PagedRows(
        lengths, page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=head_dim, num_layers=1,
        max_rows=4, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    rows.allocate()
    layer = replace(rows.layers[0], sliding_window=window, logit_soft_cap=cap)
    backends = [TritonAttentionBackend(rows.context), TorchAttentionBackend(rows.context)]
    for chunks in (None, [1, 40, 60, 3]):
        q = rows.queries(4 if chunks is None else sum(chunks))
        batch = rows.batch([0, 1, 2, 3], lengths, chunks)
        out, expected = (one.attend(q, layer, one.plan(batch, 0)) for one in backends)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [1, 5])
def test_a_shared_prefix_is_read_once_for_many_rows(group: int) -> None:
    """More rows than a tile holds; only the first one's table leads to the prefix's pages."""
    lengths = [70 + row for row in range(40)]
    rows = PagedRows(
        lengths, page_size=4, num_q_heads=2 * group, num_kv_heads=2, head_dim=16, num_layers=1
    )
    rows.allocate()
    order = [row for row in range(40) if row % 7]
    groups = [(order[:30], 68)]
    rows.share(groups)
    batch = rows.batch(order, [lengths[row] for row in order])
    q, layer, backend = (
        rows.queries(len(order)),
        rows.layers[0],
        TritonAttentionBackend(rows.context),
    )
    batch.shared = rows.shared_prefixes(order, groups, len(lengths))
    rows.page_table[order[1:30], : 68 // 4] = 0  # of the dummy page, which is not a number
    with torch.inference_mode():
        out = backend.attend(q, layer, backend.plan(batch, 0))
    expected = rows.expected(q, layer, order, [lengths[row] for row in order])
    error, token = largest_error(out, expected)
    assert error < 1e-5, token


def test_few_rows_are_split_until_all_multiprocessors_read() -> None:
    assert choose_splits(256, 8, 132) == 1
    assert choose_splits(50, 8, 132) == 1
    assert choose_splits(1, 1, 132) == 32, "no more than are merged"
    for rows in (1, 2, 8, 32):
        assert rows * 8 * choose_splits(rows, 8, 132) >= min(4 * 132, rows * 8 * 32)
