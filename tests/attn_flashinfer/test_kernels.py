"""Every argument reaches FlashInfer's modules under its own name."""

import pytest
import torch

from minisgl_attn_flashinfer.buffers import HostBuffers, PageIndex
from minisgl_attn_flashinfer.kernels import CudaCoreKernel, TensorCoreKernel, Workspace, is_split
from minisgl_attn_flashinfer.sizes import Shape
from support.fake_flashinfer import FakeEvent, FakeStream, RecordedModule

SHAPE = Shape(num_q_heads=16, num_kv_heads=8, head_dim=128, page_size=64, num_sms=132)
FLOATS = torch.zeros(512, dtype=torch.uint8)
WORKSPACE = Workspace(FLOATS, torch.zeros(32, dtype=torch.uint8))
INDEX = PageIndex(*(torch.full((4,), value, dtype=torch.int32) for value in range(4)))
Q, K, V, OUT = (torch.full((2,), float(value)) for value in range(4))


@pytest.fixture
def host() -> HostBuffers:
    return HostBuffers(4, 64, pin=False, make_event=lambda: FakeEvent(FakeStream()))


@pytest.mark.parametrize("template", ["fa2", "fa3"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("graph", [True, False])
def test_plan_on_tensor_cores(host, template, causal, graph):
    module = RecordedModule(template)
    kernel = TensorCoreKernel(module, template, SHAPE, causal=causal, pdl=True)
    assert kernel.plan(WORKSPACE, host, 3, 77, graph=graph) == [1, 2, 3]
    splits = {"fixed_split_size": -1, "disable_split_kv": False, "num_colocated_ctas": 0}
    assert module.planned == {
        "float_workspace": FLOATS,
        "int_workspace": WORKSPACE.ints,
        "pinned_int_workspace": host.schedule,
        "qo_indptr": host.qo_indptr,
        "kv_indptr": host.kv_indptr,
        "kv_len_arr": host.kv_lens,
        "total_num_rows": 77,
        "batch_size": 3,
        "num_qo_heads": 16,
        "num_kv_heads": 8,
        "page_size": 64,
        "enable_cuda_graph": graph,
        "head_dim_qk": 128,
        "head_dim_vo": 128,
        "causal": causal,
        "window_left": -1,
        **(splits if template == "fa2" else {}),
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pdl", [True, False])
def test_run_on_tensor_cores(causal, pdl):
    module = RecordedModule("fa2")
    kernel = TensorCoreKernel(module, "fa2", SHAPE, causal=causal, pdl=pdl)
    kernel.bind(WORKSPACE, [5], INDEX)(Q, K, V, OUT, 0.25)
    given = {name: value for name, value in module.ran.items() if value is not None}
    assert given == {
        "float_workspace": FLOATS,
        "int_workspace": WORKSPACE.ints,
        "plan_info": [5],
        "q": Q,
        "k": K,
        "v": V,
        "qo_indptr": INDEX.qo_indptr,
        "kv_indptr": INDEX.kv_indptr,
        "kv_indices": INDEX.indices,
        "kv_last_page_len": INDEX.last_page_lens,
        "o": OUT,
        "mask_mode": int(causal),
        "layout": 0,
        "window_left": -1,
        "enable_pdl": pdl,
        "logits_soft_cap": 0.0,
        "sm_scale": 0.25,
        "rope_scale": 1.0,
        "rope_theta": 1e4,
        "token_pos_in_items_len": 0,
        "workspace_size": 512,
    }


@pytest.mark.parametrize("graph", [True, False])
def test_plan_on_cuda_cores(host, graph):
    module = RecordedModule("decode")
    kernel = CudaCoreKernel(module, SHAPE, torch.bfloat16, pdl=True)
    assert kernel.plan(WORKSPACE, host, 3, 3, graph=graph) == [1, 2, 3]
    samples = [module.planned.pop(name) for name in ("empty_q_data", "empty_kv_data")]
    assert [(sample.dtype, sample.numel()) for sample in samples] == [(torch.bfloat16, 0)] * 2
    assert module.planned == {
        "float_workspace": FLOATS,
        "int_workspace": WORKSPACE.ints,
        "pinned_int_workspace": host.schedule,
        "kv_indptr": host.kv_indptr,
        "batch_size": 3,
        "num_qo_heads": 16,
        "num_kv_heads": 8,
        "page_size": 64,
        "enable_cuda_graph": graph,
        "window_left": -1,
        "logits_soft_cap": 0.0,
        "head_dim_qk": 128,
        "head_dim_vo": 128,
    }


@pytest.mark.parametrize("pdl", [True, False])
def test_run_on_cuda_cores(pdl):
    module = RecordedModule("decode")
    CudaCoreKernel(module, SHAPE, torch.bfloat16, pdl=pdl).bind(WORKSPACE, [5], INDEX)(
        Q, K, V, OUT, 0.25
    )
    given = {name: value for name, value in module.ran.items() if value is not None}
    assert given == {
        "float_workspace": FLOATS,
        "int_workspace": WORKSPACE.ints,
        "plan_info": [5],
        "q": Q,
        "k": K,
        "v": V,
        "kv_indptr": INDEX.kv_indptr,
        "kv_indices": INDEX.indices,
        "kv_last_page_len": INDEX.last_page_lens,
        "o": OUT,
        "layout": 0,
        "window_left": -1,
        "enable_pdl": pdl,
        "logits_soft_cap": 0.0,
        "sm_scale": 0.25,
        "rope_scale": 1.0,
        "rope_theta": 1e4,
    }


def test_rows_beyond_the_planner_s_pieces_are_never_split():
    kernel = TensorCoreKernel(RecordedModule("fa2"), "fa2", SHAPE, causal=False, pdl=True)
    assert [kernel.never_splits(rows) for rows in (1, 32, 33, 256)] == [False, False, True, True]
    cuda = CudaCoreKernel(RecordedModule("decode"), SHAPE, torch.bfloat16, pdl=True)
    assert not cuda.never_splits(10_000)


def test_the_last_number_of_a_plan_says_whether_rows_are_split():
    tensor_cores = [33, 4, 0, 16, 0, 144, 288, 432, 452, 480, 0, 0, 496, 1]
    assert is_split([*tensor_cores, 1])
    assert not is_split([*tensor_cores, 0])
