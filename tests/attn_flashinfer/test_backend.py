"""Planning, buffers and slots of the backend, with kernels that attend in torch."""

import numpy as np
import pytest
import torch

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.errors import UnsupportedBackendError
from minisgl.testing.attention_contract import LENGTHS, AttentionBackendContract
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_flashinfer.backend import FlashInferBackend, Kernels
from support.fake_flashinfer import FakeEvent, Fakes


class TestOnFakeKernels(AttentionBackendContract):
    """The whole contract: lengths, index pointers, page lists and buffers are the backend's."""

    page_sizes = (1, 16)
    groups = (2,)
    head_dims = (64,)
    mixed_batches = True
    num_launches = 30

    def create(self, context: AttentionContext) -> AttentionBackend:
        return Fakes(context).backend


def make(lengths=LENGTHS) -> tuple[PagedRows, Fakes]:
    rows = PagedRows(lengths, page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8)
    fakes = Fakes(rows.context)
    rows.allocate()
    return rows, fakes


def test_a_slot_is_planned_again_only_after_its_copies():
    rows, fakes = make()
    log = fakes.stream.log
    for slot in (0, 1):
        fakes.backend.plan(rows.batch([11], [300 + slot]), slot)
    assert log == ["plan", "plan"]
    fakes.backend.plan(rows.batch([11], [302]), 0)
    assert log == ["plan", "plan", "wait", "plan"]


def test_a_slot_whose_copies_are_done_is_not_waited_for():
    rows, fakes = make()
    layer, q = rows.layers[0], rows.queries(1)
    for number in range(6):
        plan = fakes.backend.plan(rows.batch([11], [300 + number]), number % 2)
        fakes.backend.attend(q, layer, plan)
    assert "wait" not in fakes.stream.log


@pytest.mark.parametrize("waits", [True, False])
def test_without_the_wait_a_late_copy_would_take_another_launch_s_schedule(waits):
    rows, fakes = make()
    fakes.backend.plan(rows.batch([11], [300]), 0)
    host, device, _, _ = fakes.decode.plans[0]
    if not waits:
        host.acquire = lambda: None  # type: ignore[method-assign]
    fakes.backend.plan(rows.batch([11], [17]), 0)
    fakes.stream.run_up_to(1)
    assert int(device.view(torch.int32)[0]) == (300 if waits else 17)


def test_slots_and_phases_share_neither_host_nor_device_buffers():
    rows, fakes = make()
    for slot in (0, 1):
        fakes.backend.plan(rows.batch([11], [300]), slot)
        fakes.backend.plan(rows.batch([10], [300], [7]), slot)
    used = [*fakes.decode.plans, *fakes.prefill.plans]
    assert len({id(host) for host, _, _, _ in used}) == 4
    assert len({ints.data_ptr() for _, ints, _, _ in used}) == 4
    assert not any(graph for _, _, _, graph in used)


def test_a_mixed_launch_goes_to_the_prefill_kernel():
    rows, fakes = make()
    fakes.backend.plan(rows.batch([11, 10], [300, 20], [1, 7], num_decode_rows=1), 0)
    assert (len(fakes.prefill.plans), len(fakes.decode.plans)) == (1, 0)


def test_page_lists_grow_with_the_launches():
    rows, fakes = make([70_000, 5])
    layer = rows.layers[0]
    for seen in ([16, 5], [70_000, 5], [17, 1]):
        q = rows.queries(2)
        out = fakes.backend.attend(q, layer, fakes.backend.plan(rows.batch([0, 1], seen), 0))
        torch.testing.assert_close(out.double(), rows.expected(q, layer, [0, 1], seen))


def test_queries_that_were_not_planned_are_noticed():
    rows, fakes = make()
    plan = fakes.backend.plan(rows.batch([11, 3], [300, 16]), 0)
    with pytest.raises(AssertionError, match="not those that were planned"):
        fakes.backend.attend(rows.queries(3), rows.layers[0], plan)


def test_more_rows_than_the_engine_announced_are_noticed():
    rows, fakes = make()
    with pytest.raises(AssertionError, match="13 rows in a launch, room for 12"):
        fakes.backend.plan(rows.batch([0] * 13, [1] * 13), 0)


def test_a_phase_without_kernels_is_refused_by_name():
    rows, fakes = make()
    arguments = (torch.zeros(8, dtype=torch.uint8), lambda: FakeEvent(fakes.stream))
    nothing = FlashInferBackend(rows.context, fakes.shape, Kernels(None, {}), *arguments)
    assert nothing.cuda_graphs is None
    with pytest.raises(UnsupportedBackendError, match="no decode kernel here"):
        nothing.plan(rows.batch([0], [1]), 0)
    with pytest.raises(UnsupportedBackendError, match="no prefill kernel here"):
        nothing.plan(rows.batch([3], [16], [16]), 0)


def test_the_batch_s_arrays_are_not_kept():
    rows, fakes = make()
    batch = rows.batch([11, 9], [300, 129], [40, 129])
    q = rows.queries(169)
    plan = fakes.backend.plan(batch, 0)
    batch.kv_lens[:] = 1
    batch.query_lens[:] = 1
    out = fakes.backend.attend(q, rows.layers[0], plan)
    expected = rows.expected(q, rows.layers[0], [11, 9], [300, 129], [40, 129])
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_index_pointers_are_int32_whatever_numpy_would_take():
    rows, fakes = make()
    fakes.backend.plan(rows.batch([11, 0], [777, 1]), 0)
    host = fakes.decode.plans[0][0]
    assert host.kv_indptr.dtype == host.kv_lens.dtype == torch.int32
    assert host.kv_indptr[:3].tolist() == [0, 49, 50]
    assert host.kv_lens[:2].tolist() == [777, 1]
    assert np.shares_memory(host.kv_lens.numpy(), host._kv_lens)
