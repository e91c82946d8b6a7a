"""The whole contract on each version's calls, with functions that attend in torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.testing.attention_contract import LENGTHS, AttentionBackendContract
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_fa.backend import FaBackend
from minisgl_attn_fa.create import prepare
from minisgl_attn_fa.fa4 import DirectKernels, FlashAttention4
from minisgl_attn_fa.kept import KeptKernels
from minisgl_attn_fa.kernels import FlashAttention2, FlashAttention3, Kernel
from minisgl_attn_fa.samples import samples
from support import fake_flash_attn as fakes
from support.kernel_objects import needs_compiler


def kernel(version: str) -> Kernel:
    if version == "fa4":
        return FlashAttention4(fakes.fa4_varlen)
    if version == "fa3":
        return FlashAttention3(fakes.fa3_with_kvcache)
    return FlashAttention2(fakes.fa2_with_kvcache, fakes.fa2_varlen)


class OnFakes(AttentionBackendContract):
    version: ClassVar[str]
    page_sizes: ClassVar[Sequence[int]] = (1, 16, 128)
    groups = (1, 5)
    head_dims = (64,)
    mixed_batches = True
    num_launches = 30

    def create(self, context: AttentionContext) -> AttentionBackend:
        return FaBackend(context, kernel(self.version), fakes.LateEvent)


class TestVersion4(OnFakes):
    version = "fa4"


class TestVersion4WithKernelsCalledDirectly(OnFakes):
    version = "fa4"

    def create(self, context: AttentionContext) -> AttentionBackend:
        interface = fakes.FakeInterface()
        learned = FlashAttention4(interface.flash_attn_varlen_func, interface)
        for sample in samples(context):
            prepare(learned, sample)
        return FaBackend(context, learned, fakes.LateEvent)


@needs_compiler
class TestVersion4WithKeptKernels(OnFakes):
    version = "fa4"

    @pytest.fixture(autouse=True)
    def _compiled(self, kernel_objects, tmp_path):
        self.kept = KeptKernels(tmp_path, {"for": "this test"})
        self.kept.keep("any", kernel_objects.right, [kernel_objects.runtime])

    def create(self, context: AttentionContext) -> AttentionBackend:
        any_kind = self.kept.load("any")
        kinds = [(decode, window) for decode in (True, False) for window in (True, False)]
        kernels = DirectKernels(dict.fromkeys(kinds, any_kind))
        return FaBackend(context, kernels, fakes.LateEvent)


class TestVersion3(OnFakes):
    version = "fa3"


class TestVersion2(OnFakes):
    version = "fa2"
    page_sizes = (256, 512)
    usual_page_size = 256


def make(version: str, page_size: int = 16) -> tuple[PagedRows, FaBackend]:
    rows = PagedRows(LENGTHS, page_size=page_size, num_q_heads=4, num_kv_heads=2, head_dim=8)
    backend = FaBackend(rows.context, kernel(version), fakes.LateEvent)
    rows.allocate()
    return rows, backend


@pytest.mark.parametrize("version", ["fa4", "fa3", "fa2"])
@pytest.mark.parametrize("window", [1, 7, 100])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_windows_and_caps_are_those_of_the_reference(version, window, cap):
    if version == "fa4" and cap is not None:
        pytest.skip("version 4 refuses caps")
    rows, backend = make(version, 256)
    reference = TorchAttentionBackend(rows.context)
    layer = replace(rows.layers[0], sliding_window=window, logit_soft_cap=cap)
    for order, seen, chunks in (
        ([11, 3, 6], [777, 16, 40], None),
        ([9, 11, 0], [129, 700, 1], [100, 33, 1]),
    ):
        q = rows.queries(sum(chunks or [1] * len(order)))
        batch = rows.batch(order, seen, chunks)
        expected = reference.attend(q, layer, reference.plan(batch, 0))
        out = backend.attend(q, layer, backend.plan(batch, 0))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_slot_s_index_pointers_are_written_again_only_after_their_copy():
    events = [fakes.LateEvent() for _ in range(2)]
    rows = PagedRows(LENGTHS, page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8)
    backend = FaBackend(rows.context, kernel("fa4"), iter(events).__next__)
    for _ in range(2):
        for slot in (0, 1):
            backend.plan(rows.batch([10, 7], [300, 65], [100, 65]), slot)
            backend.plan(rows.batch([11], [300]), slot)  # has none
    assert [event.log for event in events] == [["wait", "record"] * 2] * 2


def test_index_pointers_of_a_launch_are_its_own():
    rows, backend = make("fa3")
    first = backend.plan(rows.batch([10, 7], [300, 65], [100, 65]), 0)
    second = backend.plan(rows.batch([9], [129], [129]), 0)
    assert first.query_ends.tolist() == [0, 100, 165]
    assert first.kv_ends.tolist() == [0, 300, 365]
    assert second.query_ends.tolist() == [0, 129]
    assert (first.most_queries, first.most_keys, first.num_tokens) == (100, 300, 165)


def test_the_block_table_is_as_wide_as_the_longest_row_needs():
    rows, backend = make("fa4")
    plan = backend.plan(rows.batch([11, 0], [33, 1]), 0)
    assert plan.page_table.shape == (2, 3)
    assert plan.page_table.tolist() == rows.page_table[[11, 0], :3].tolist()


def test_a_recorded_launch_gathers_its_pages_from_the_batch_s_own_tensors():
    rows, backend = make("fa4")
    large, small = (rows.batch([rows.padding_row] * size, [1] * size) for size in (3, 2))
    plans = [backend.prepare_capture(batch) for batch in (large, small)]
    layer = rows.layers[0]
    for batch, plan, order, seen in (
        (large, plans[0], [11, 3, 0], [777, 16, 1]),
        (small, plans[1], [9, 10], [129, 64]),
        (large, plans[0], [1, 11, 2], [2, 500, 15]),
    ):
        batch.rows.copy_(torch.tensor(order))
        batch.kv_lens_device.copy_(torch.tensor(seen))
        address = plan.page_table.data_ptr()
        backend.enqueue(batch, plan)
        assert plan.page_table.data_ptr() == address
        q = rows.queries(len(order))
        out = backend.attend(q, layer, plan)
        expected = rows.expected(q, layer, order, seen)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_queries_that_were_not_planned_are_noticed():
    rows, backend = make("fa4")
    plan = backend.plan(rows.batch([11, 3], [300, 16]), 0)
    with pytest.raises(AssertionError, match="not those that were planned"):
        backend.attend(rows.queries(3), rows.layers[0], plan)


def test_more_rows_than_the_engine_announced_are_noticed():
    rows, backend = make("fa4")
    with pytest.raises(AssertionError, match="13 rows in a launch, room for 12"):
        backend.plan(rows.batch([9] * 13, [9] * 13, [9] * 13), 0)


def test_the_batch_s_arrays_are_not_kept():
    rows, backend = make("fa2", 256)
    batch = rows.batch([11, 9], [300, 129], [40, 129])
    q = rows.queries(169)
    plan = backend.plan(batch, 0)
    batch.kv_lens[:] = 1
    batch.query_lens[:] = 1
    out = backend.attend(q, rows.layers[0], plan)
    expected = rows.expected(q, rows.layers[0], [11, 9], [300, 129], [40, 129])
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
