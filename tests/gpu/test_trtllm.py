"""The backend ``trtllm`` on a card: the contract, and its calls beside FlashInfer's own."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.plugins import Supported, Unsupported
from minisgl.plugins.query import query_of_context
from minisgl.testing.attention_contract import LENGTHS, AttentionBackendContract
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_flashinfer import installed
from minisgl_attn_flashinfer.modules import xqa_module
from minisgl_attn_flashinfer.settings import TrtllmSettings
from minisgl_attn_flashinfer.trtllm_create import create_trtllm
from minisgl_attn_flashinfer.trtllm_probe import probe_trtllm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(installed.why_unusable() is not None, reason="needs FlashInfer"),
    # FlashInfer and what it imports warn about themselves.
    pytest.mark.filterwarnings("default"),
]


def create(context: AttentionContext, settings: TrtllmSettings) -> AttentionBackend:
    """The backend; skips shapes that would have to be compiled here."""
    answer = probe_trtllm(query_of_context(context, torch.cuda.get_device_capability()))
    if isinstance(answer, Unsupported):
        pytest.skip(answer.reason)
    assert isinstance(answer, Supported)
    if not answer.decode_rank:
        pytest.skip("no compiled module for this shape")
    return create_trtllm(context, settings)


class Trtllm(AttentionBackendContract):
    device = "cuda"
    dtype = torch.bfloat16
    phases = ("decode",)
    page_sizes: ClassVar[Sequence[int]] = (16, 32, 64, 128)
    num_kv_heads = 8
    graph_sizes = (1, 2, 5, 16, 17, 33, 64, 200)
    settings = TrtllmSettings()

    def create(self, context: AttentionContext) -> AttentionBackend:
        return create(context, self.settings)


class TestHeadDim128(Trtllm):
    groups = (2, 4, 5, 8)
    head_dims = (128,)


class TestHeadDim64(Trtllm):
    groups = (3,)
    head_dims = (64,)


class TestOneKVHead(Trtllm):
    """As on one of many ranks: rows are split into many pieces."""

    groups = (8,)
    head_dims = (128,)
    num_kv_heads = 1
    page_sizes = (16, 64)


class TestWithoutDependentLaunch(Trtllm):
    groups = (4,)
    head_dims = (128,)
    page_sizes = (16,)
    settings = TrtllmSettings(pdl=False)


def make(page_size: int) -> tuple[PagedRows, AttentionBackend]:
    rows = PagedRows(
        LENGTHS,
        page_size=page_size,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
    )
    backend = create(rows.context, TrtllmSettings())
    rows.allocate()
    return rows, backend


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("order", [[11], [11, 0, 4, 10, 7, 3, 9, 8, 2]])
def test_decode_is_bit_for_bit_that_of_flashinfer_s_function(page_size, order):
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    rows, backend = make(page_size)
    layer, seen = rows.layers[0], [LENGTHS[row] for row in order]
    q = rows.queries(len(order))
    plan = backend.plan(rows.batch(order, seen), 0)
    out = backend.attend(q, layer, plan)
    expected = trtllm_batch_decode_with_kv_cache(
        q,
        rows.pool.layer(0),
        torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda"),
        rows.page_table[order, : plan.page_table.shape[1]].contiguous(),
        torch.tensor(seen, dtype=torch.int32, device="cuda"),
        max(seen),
        bmm1_scale=layer.scale,
        kv_layout="NHD",
    )
    assert torch.equal(out, expected)


def test_module_names_are_flashinfer_s():
    from flashinfer.jit.xqa import gen_xqa_module

    spec = gen_xqa_module(*(torch.bfloat16,) * 2, 32, 128, 5, False, torch.bfloat16, 1)
    assert spec.name == xqa_module("bfloat16", 32, 128, 5)
