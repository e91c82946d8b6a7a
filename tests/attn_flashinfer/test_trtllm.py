"""The backend ``trtllm``: the contract and its calls, on functions that attend in torch."""

import pytest
import torch

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.errors import UnsupportedBackendError
from minisgl.plugins import Supported, Unsupported
from minisgl.testing.attention_contract import LENGTHS, AttentionBackendContract
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_flashinfer.measured_ranks import RANKS
from minisgl_attn_flashinfer.plugin import minisgl_attention_backends
from minisgl_attn_flashinfer.trtllm import TrtllmBackend, TrtllmGen, Xqa
from minisgl_attn_flashinfer.trtllm_create import warm_up
from minisgl_attn_flashinfer.trtllm_probe import NOT_COMPILED_RANK, probe_trtllm
from support.fake_trtllm import FakeGen, FakeXqa
from support.kernel_site import query

TABLE = RANKS["trtllm"]
RANK = TABLE.decode_rank(16, 16, 8)


class OnFakes(AttentionBackendContract):
    phases = ("decode",)
    page_sizes = (16, 128)
    groups = (1, 5)
    head_dims = (64,)
    num_launches = 30


class TestXqa(OnFakes):
    def create(self, context: AttentionContext) -> AttentionBackend:
        return TrtllmBackend(context, Xqa(FakeXqa(), context, 132, pdl=True))


class TestTrtllmGen(OnFakes):
    def create(self, context: AttentionContext) -> AttentionBackend:
        return TrtllmBackend(context, TrtllmGen(FakeGen(), context, 148, pdl=True))


def make(kernel: str = "xqa") -> tuple[PagedRows, TrtllmBackend, FakeXqa | FakeGen]:
    rows = PagedRows(LENGTHS, page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8)
    if kernel == "xqa":
        xqa = FakeXqa()
        backend = TrtllmBackend(rows.context, Xqa(xqa, rows.context, 132, pdl=False))
        rows.allocate()
        return rows, backend, xqa
    gen = FakeGen()
    backend = TrtllmBackend(rows.context, TrtllmGen(gen, rows.context, 148, pdl=False))
    rows.allocate()
    return rows, backend, gen


@pytest.mark.parametrize("kernel", ["xqa", "gen"])
def test_workspaces_begin_with_zeros_and_are_the_same_for_all_launches(kernel):
    rows, backend, fake = make(kernel)
    for seen in ([777, 3], [5, 129]):
        plan = backend.plan(rows.batch([11, 9], seen), 0)
        backend.attend(rows.queries(2), rows.layers[0], plan)
    first, second = fake.workspaces
    assert [part.data_ptr() for part in first] == [part.data_ptr() for part in second]
    assert all(not part.any() for part in first)


def test_other_launches_than_decode_name_the_way_out():
    rows, backend, _ = make()
    with pytest.raises(UnsupportedBackendError, match="a pair whose first one prefills, such as"):
        backend.plan(rows.batch([10], [300], [100]), 0)


def test_the_table_is_as_wide_as_rows_need_and_a_graph_s_as_wide_as_they_may_become():
    rows, backend, _ = make()
    plan = backend.plan(rows.batch([11, 0], [33, 1]), 0)
    assert (plan.page_table.shape, plan.most_keys) == ((2, 3), 48)
    recorded = backend.prepare_capture(rows.batch([rows.padding_row] * 2, [1, 1]))
    assert recorded.most_keys == rows.context.max_seq_len


def test_a_recorded_launch_reads_the_batch_s_own_tensors():
    rows, backend, _ = make()
    batch = rows.batch([rows.padding_row] * 3, [1] * 3)
    plan = backend.prepare_capture(batch)
    for order, seen in (([11, 3, 0], [777, 16, 1]), ([1, 9, 2], [2, 100, 15])):
        batch.rows.copy_(torch.tensor(order))
        batch.kv_lens_device.copy_(torch.tensor(seen))
        backend.enqueue(batch, plan)
        q = rows.queries(3)
        out = backend.attend(q, rows.layers[0], plan)
        expected = rows.expected(q, rows.layers[0], order, seen)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_kernels_run_before_they_serve_with_one_row_and_with_many():
    rows = PagedRows([40], page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8, max_rows=9)
    fake = FakeXqa()
    warm_up(Xqa(fake, rows.context, 132, pdl=True), rows.context)
    assert fake.batch_sizes == [1, 9]


def test_more_rows_than_there_are_counters_for_are_noticed():
    rows, backend, _ = make()
    plan = backend.plan(rows.batch([0] * 13, [1] * 13), 0)
    with pytest.raises(AssertionError, match="13 rows in a launch, room for 12"):
        backend.attend(rows.queries(13), rows.layers[0], plan)


# -- the probe


def reason(**changed) -> str:
    answer = probe_trtllm(query(**changed))
    assert isinstance(answer, Unsupported), answer
    return answer.reason


def test_with_the_shape_s_module_it_decodes(flashinfer_site):
    flashinfer_site.flashinfer(compiled=("xqa",))
    assert probe_trtllm(query()) == Supported(None, RANK, TABLE.source)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"page_size": 64}, "page_size_64_head_dim_128_head_group_ratio_2"),
        ({"num_q_heads": 32}, "page_size_16_head_dim_128_head_group_ratio_4"),
        ({"head_dim": 64}, "page_size_16_head_dim_64_head_group_ratio_2"),
        ({"dtype": "float16", "kv_dtype": "float16"}, "xqa_input_f16_kv_cache_f16_output_f16"),
    ],
)
def test_another_shape_is_another_module(flashinfer_site, changed, name):
    flashinfer_site.flashinfer(compiled=("xqa",))
    text = reason(**changed)
    assert f"has no compiled {name}" in text or name in text
    assert "and cannot compile it: no nvcc at" in text


def test_what_has_to_be_compiled_is_not_compiled_to_be_measured(flashinfer_site):
    flashinfer_site.flashinfer()
    flashinfer_site.compiler()
    answer = probe_trtllm(query())
    assert isinstance(answer, Supported)
    assert (answer.prefill_rank, answer.decode_rank) == (None, NOT_COMPILED_RANK)
    assert "compiled first" in answer.source


def test_blackwell_needs_the_compiled_kernels_of_trtllm_gen(flashinfer_site):
    flashinfer_site.flashinfer(compiled=("gen",))
    text = reason(compute_capability=(10, 0))
    assert "needs flashinfer-cubin 0.6.12" in text
    assert "would download kernels while it serves" in text
    flashinfer_site.distribution("flashinfer-cubin", "0.6.12", "flashinfer_cubin/__init__.py")
    assert probe_trtllm(query(compute_capability=(10, 3))) == Supported(None, RANK, TABLE.source)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"compute_capability": (11, 0)}, "needs compute capability 9.x, 10.x or 12.x, found 11.0"),
        ({"num_q_heads": 256}, "takes up to 16 query heads per KV head, the model has 32"),
        ({"num_q_heads": 12}, "found 12 query heads and 8 KV heads"),
        ({"kv_dtype": "float16"}, "needs K and V in the dtype of q, bfloat16; got float16"),
    ],
)
def test_what_neither_kernel_takes(flashinfer_site, changed, expected):
    flashinfer_site.flashinfer(compiled=("xqa", "gen"))
    assert expected in reason(**changed)


def test_without_flashinfer(monkeypatch):
    monkeypatch.setattr("minisgl_attn_flashinfer.installed.flashinfer_version", lambda: None)
    assert "which is not installed: pip install flashinfer-python" in reason()


def test_the_record_declares_decode_alone():
    _, record = minisgl_attention_backends()
    assert record.name == "trtllm"
    assert record.capabilities.phases == ("decode",)
    assert record.capabilities.page_sizes == (16, 32, 64, 128)
