"""Triton's attention in its interpreter: the contract, windows and caps; on a card: tests/gpu."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.attention.triton_backend import TritonAttentionBackend
from minisgl.kernel.triton.attention import choose_cut, longest_first
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
    assert choose_cut(256, 8, 132).splits == 1
    assert choose_cut(60, 8, 132).splits == 1
    assert choose_cut(1, 1, 132).splits == 32, "no more than are merged"
    for rows in (1, 2, 8, 32, 40):
        programs = rows * 8 * choose_cut(rows, 8, 132).splits
        assert programs >= min(1.8 * 2 * 132, rows * 8 * 32)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=70))
@settings(max_examples=20)
def test_the_longest_rows_come_first(lengths: list[int]) -> None:
    order = torch.full((len(lengths),), -1, dtype=torch.int32)
    longest_first(torch.tensor(lengths, dtype=torch.int32), order)
    assert order.tolist() == sorted(range(len(lengths)), key=lambda row: -lengths[row])


def test_a_launch_in_another_order_gives_each_row_its_own_output() -> None:
    lengths = [5, 90, 33, 64, 1, 70]
    rows = PagedRows(
        lengths, page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=16, num_layers=1
    )
    rows.allocate()
    backend, q = TritonAttentionBackend(rows.context), rows.queries(len(lengths))
    batch = rows.batch(range(len(lengths)), lengths)
    with torch.inference_mode():
        plan = backend.prepare_capture(batch)
        backend.enqueue(batch, plan)
        out = backend.attend(q, rows.layers[0], plan)
    error, token = largest_error(out, rows.expected(q, rows.layers[0], range(6), lengths))
    assert error < 1e-5, token
    assert plan.decode.order.tolist() == [1, 5, 3, 2, 0, 4]
