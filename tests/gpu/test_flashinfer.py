"""The backend ``flashinfer`` on a card: the contract, and its calls beside FlashInfer's own."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.kernel.ops import OpTable
from minisgl.plugins import BackendQuery
from minisgl.plugins.host import load_plugins
from minisgl.plugins.selection import select_ops
from minisgl.testing.attention_contract import LENGTHS, AttentionBackendContract
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_flashinfer import installed
from minisgl_attn_flashinfer.create import create_backend
from minisgl_attn_flashinfer.graphs import FlashInferGraphs
from minisgl_attn_flashinfer.modules import decode_module, prefill_module
from minisgl_attn_flashinfer.settings import FlashInferSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(installed.why_unusable() is not None, reason="needs FlashInfer"),
    # FlashInfer and what it imports warn about themselves.
    pytest.mark.filterwarnings("default"),
]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@functools.cache
def device_ops() -> OpTable:
    """The operations that an engine would give the backend here."""
    query = BackendQuery(
        device="cuda",
        compute_capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=16,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
    )
    return select_ops(load_plugins(), query)


class FlashInfer(AttentionBackendContract):
    device = "cuda"
    dtype = torch.bfloat16
    num_kv_heads = 8
    mixed_batches = True
    # On 132 multiprocessors and 8 KV heads, 33 rows and more are not split on tensor cores.
    graph_sizes = (1, 2, 5, 16, 32, 33, 64, 200)
    settings = FlashInferSettings()

    def create(self, context: AttentionContext) -> AttentionBackend:
        return create_backend(context, self.settings)

    def ops(self) -> OpTable:
        return device_ops()


class TestFlashInfer(FlashInfer):
    """As it runs by default: fa3 on Hopper, decode kernels by rows and group."""


class TestFlashInferWithTorchOps(FlashInfer):
    page_sizes = (16,)
    groups = (2,)
    head_dims = (128,)

    def ops(self) -> OpTable:
        return OpTable()


class TestFa2AndTensorCores(FlashInfer):
    page_sizes = (1, 16)
    groups = (1, 2, 8)
    settings = FlashInferSettings(prefill_template="fa2", decode_kernel="tensor")


class TestCudaCores(FlashInfer):
    page_sizes = (1, 16)
    groups = (1, 2, 4, 8)
    settings = FlashInferSettings(decode_kernel="cuda")


class TestFewKVHeads(FlashInfer):
    """As on one of many ranks: rows are split up to 132 of them, and CUDA cores all the more."""

    num_kv_heads = 1
    page_sizes = (16,)
    groups = (2, 8)
    graph_sizes = (1, 2, 17, 64, 131, 132, 200, 256)


class TestWithoutDependentLaunch(FlashInfer):
    page_sizes = (16,)
    groups = (2,)
    head_dims = (128,)
    settings = FlashInferSettings(pdl=False)


def make(settings: FlashInferSettings, *, group: int = 2, num_kv_heads: int = 8, page_size=16):
    rows = PagedRows(
        LENGTHS,
        page_size=page_size,
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        ops=device_ops(),
    )
    backend = create_backend(rows.context, settings)
    rows.allocate()
    return rows, backend


def test_module_names_are_flashinfer_s():
    from flashinfer.jit.attention.modules import get_batch_decode_uri, get_batch_prefill_uri

    common = (torch.bfloat16,) * 3 + (torch.int32, 128, 128, 0, False, False)
    for template in ("fa2", "fa3"):
        name = prefill_module(template, "bfloat16", 128)
        assert name == get_batch_prefill_uri(template, *common, False)
    assert decode_module("bfloat16", 128) == get_batch_decode_uri(*common)
    halves = (torch.float16,) * 3 + (torch.int32, 64, 64, 0, False, False)
    assert decode_module("float16", 64) == get_batch_decode_uri(*halves)


def test_codes_are_flashinfer_s():
    from flashinfer.utils import MaskMode, TensorLayout

    from minisgl_attn_flashinfer import kernels

    assert MaskMode.CAUSAL.value == kernels._CAUSAL
    assert MaskMode.NON_CAUSAL.value == kernels._NON_CAUSAL
    assert TensorLayout.NHD.value == kernels._NHD


def wrapper_index(rows: PagedRows, order: list[int], seen: list[int]) -> tuple[torch.Tensor, ...]:
    """kv_indptr and last_page_len on the host, indices on the device, made the plain way."""
    lengths = np.array(seen)
    pages = -(-lengths // rows.page_size)
    indptr = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
    last = (lengths - (pages - 1) * rows.page_size).astype(np.int32)
    indices = torch.cat([rows.page_table[r, :n] for r, n in zip(order, pages, strict=True)])
    return torch.from_numpy(indptr), indices, torch.from_numpy(last)


@pytest.mark.parametrize("template", ["fa2", "fa3"])
def test_prefill_is_bit_for_bit_that_of_flashinfer_s_wrapper(template):
    if template == "fa3" and not HOPPER:
        pytest.skip("fa3 needs compute capability 9.x")
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    rows, backend = make(FlashInferSettings(prefill_template=template))
    layer, order, chunks = rows.layers[0], [11, 9, 0, 10], [200, 129, 1, 3]
    seen = [LENGTHS[row] for row in order]
    q = rows.queries(sum(chunks))
    out = backend.attend(q, layer, backend.plan(rows.batch(order, seen, chunks), 0))
    floats = torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(floats, "NHD", backend=template)
    indptr, indices, last = wrapper_index(rows, order, seen)
    wrapper.plan(
        torch.tensor(np.concatenate(([0], np.cumsum(chunks))), dtype=torch.int32),
        indptr,
        indices,
        last,
        layer.num_q_heads,
        layer.num_kv_heads,
        layer.head_dim,
        rows.page_size,
        causal=True,
        sm_scale=layer.scale,
        q_data_type=torch.bfloat16,
    )
    assert torch.equal(out, wrapper.run(q, rows.pool.layer(0)))


@pytest.mark.parametrize("kernel", ["tensor", "cuda"])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_decode_is_bit_for_bit_that_of_flashinfer_s_wrapper(kernel, group):
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    rows, backend = make(FlashInferSettings(decode_kernel=kernel), group=group)
    layer, order = rows.layers[0], [11, 0, 4, 10, 7]
    seen = [LENGTHS[row] for row in order]
    q = rows.queries(len(order))
    out = backend.attend(q, layer, backend.plan(rows.batch(order, seen), 1))
    floats = torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(floats, "NHD", use_tensor_cores=kernel == "tensor")
    wrapper.plan(
        *wrapper_index(rows, order, seen),
        layer.num_q_heads,
        layer.num_kv_heads,
        layer.head_dim,
        rows.page_size,
        sm_scale=layer.scale,
        q_data_type=torch.bfloat16,
    )
    assert torch.equal(out, wrapper.run(q, rows.pool.layer(0)))


@pytest.mark.parametrize("kernel", ["tensor", "cuda"])
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 2), (8, 4), (4, 8), (1, 8), (1, 1)])
def test_every_graph_size_is_planned_alike_for_all_lengths(kernel, kv_heads, group):
    """Captures compare the extremes by themselves; here random lengths come on top."""
    rows, backend = make(
        FlashInferSettings(decode_kernel=kernel), group=group, num_kv_heads=kv_heads
    )
    graphs: Any = backend.cuda_graphs
    assert isinstance(graphs, FlashInferGraphs)
    random = np.random.default_rng(0)
    for size in (256, 255, 133, 132, 131, 66, 65, 34, 33, 32, 17, 16, 8, 4, 3, 2, 1):
        with torch.inference_mode():
            plan = graphs.prepare_capture(rows.batch([rows.padding_row] * size, [1] * size))
        if kernel == "tensor":
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            assert plan.planned == (size < 2 * sms // kv_heads)
        for number in range(20):
            longest = int(random.integers(1, rows.context.max_seq_len + 1))
            lengths = random.integers(1, longest + 1, size=size).astype(np.int32)
            graphs.prepare_replay(plan, lengths, number % 2)


def test_the_float_workspace_suffices_for_what_splits_most():
    """Few rows, long prefixes, large tiles: where FlashInfer's planner asks for most."""
    rows = PagedRows(
        (16384, 16384),
        page_size=64,
        num_q_heads=64,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        ops=device_ops(),
    )
    for prefill, decode in (("fa2", "tensor"), ("auto", "tensor"), ("auto", "cuda")):
        settings = FlashInferSettings(prefill_template=prefill, decode_kernel=decode)
        backend = create_backend(rows.context, settings)
        with torch.inference_mode():
            for order, seen, chunks in (
                ([0], [16384], [64]),
                ([0, 1], [16384, 16384], [17, 128]),
                ([0, 1], [16384, 9], [1, 9]),
                ([0, 1], [16384, 16384], [512, 512]),
            ):
                backend.plan(rows.batch(order, seen, chunks), 0)
            backend.plan(rows.batch([0], [16384]), 0)
            backend.plan(rows.batch([0, 1], [16384, 1]), 1)
