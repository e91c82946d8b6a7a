"""The reference backend against attention written out token by token in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.attention.batch import Batch
from minisgl.attention.hybrid import HybridBackend
from minisgl.attention.interface import AttentionContext, AttentionLayerSpec
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.errors import UnsupportedBackendError
from minisgl.kvcache.interface import KVPoolSpec
from minisgl.kvcache.mha_pool import MHAKVCachePool

CPU = torch.device("cpu")
HEAD_DIM, KV_HEADS = 8, 2


def backend_and_pool(page_size: int, q_heads: int) -> tuple[TorchAttentionBackend, MHAKVCachePool]:
    spec = KVPoolSpec(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=page_size,
        dtype=torch.float32,
        device=CPU,
    )
    pool = MHAKVCachePool(spec)
    pool.allocate(1 + 6 * -(-64 // page_size))
    context = AttentionContext(
        device=CPU,
        dtype=torch.float32,
        num_q_heads=q_heads,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_layers=1,
        page_size=page_size,
        kv_pool=pool,
        max_running_requests=6,
        max_seq_len=64,
    )
    return TorchAttentionBackend(context), pool


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec, position: int
) -> torch.Tensor:
    """One query token ``[heads, d]`` at ``position`` over K and V ``[positions, kv heads, d]``."""
    first = 0
    if layer.sliding_window is not None:
        first = max(0, position - layer.sliding_window + 1)
    out = []
    for head in range(layer.num_q_heads):
        kv_head = head // (layer.num_q_heads // layer.num_kv_heads)
        keys = k[first : position + 1, kv_head].double()
        scores = keys @ q[head].double() * layer.scale
        if layer.logit_soft_cap is not None:
            scores = torch.tanh(scores / layer.logit_soft_cap) * layer.logit_soft_cap
        out.append(scores.softmax(0) @ v[first : position + 1, kv_head].double())
    return torch.stack(out).float()


@given(
    page_size=st.sampled_from([1, 3, 16]),
    group=st.sampled_from([1, 3]),
    decode=st.lists(st.integers(1, 60), max_size=3),
    prefill=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=2),
    window=st.sampled_from([None, 1, 7, 100]),
    soft_cap=st.sampled_from([None, None, 2.0]),
    seed=st.integers(0, 5),
)
def test_any_mixed_batch_equals_attention_written_out(
    page_size: int,
    group: int,
    decode: list[int],
    prefill: list[tuple[int, int]],
    window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    lens = [(length - 1, 1) for length in decode] + prefill
    if not lens:
        return
    q_heads = KV_HEADS * group
    backend, pool = backend_and_pool(page_size, q_heads)
    layer = AttentionLayerSpec(
        index=0,
        num_q_heads=q_heads,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=0.3,
        sliding_window=window,
        logit_soft_cap=soft_cap,
    )
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    width = -(-64 // page_size)
    table = random.permutation(np.arange(1, 1 + 6 * width, dtype=np.int32)).reshape(6, width)
    # What lies beyond a row's length, or in other pages, must not matter.
    for part in pool.layer(0):
        part.fill_(50.0)
    rows = random.permutation(6)[: len(lens)]
    sequences = []
    for row, (start, length) in zip(rows, lens, strict=True):
        total = start + length
        positions = np.arange(total)
        slots = table[row, positions // page_size].astype(np.int64) * page_size
        k, v = torch.randn(total, KV_HEADS, HEAD_DIM), torch.randn(total, KV_HEADS, HEAD_DIM)
        pool.store(k, v, torch.from_numpy(slots + positions % page_size), 0)
        sequences.append((k, v))
    query_lens = np.array([length for _, length in lens], dtype=np.int32)
    kv_lens = np.array([start + length for start, length in lens], dtype=np.int32)
    num_tokens = int(query_lens.sum())
    nothing = torch.zeros(num_tokens, dtype=torch.int64)
    batch = Batch(
        input_ids=nothing,
        positions=nothing,
        slots=nothing,
        sample_indices=None,
        rows=torch.from_numpy(rows.astype(np.int64)),
        num_decode_rows=len(decode),
        query_lens=query_lens,
        kv_lens=kv_lens,
        kv_lens_device=torch.from_numpy(kv_lens),
        page_table=torch.from_numpy(table),
        page_size=page_size,
    )
    q = torch.randn(num_tokens, q_heads, HEAD_DIM)
    out = backend.attend(q, layer, backend.plan(batch, 0))
    token = 0
    for (k, v), (start, length) in zip(sequences, lens, strict=True):
        for position in range(start, start + length):
            expected = naive(q[token], k, v, layer, position)
            torch.testing.assert_close(out[token], expected, atol=1e-5, rtol=1e-4)
            token += 1


class Marked(TorchAttentionBackend):
    """A backend that says who planned."""

    def __init__(self, name: str) -> None:
        self.name = name

    def plan(self, batch: Batch, slot: int) -> str:  # type: ignore[override]
        return f"{self.name}{slot}"

    def attend(self, q, layer, plan, new_kv=None):  # type: ignore[no-untyped-def,override]
        return plan


@pytest.mark.parametrize(
    ("num_decode", "num_rows", "expected"),
    [(2, 2, "decode1"), (0, 2, "prefill1"), (1, 2, "prefill1")],
)
def test_a_hybrid_sends_each_launch_to_the_backend_of_its_phase(
    num_decode: int, num_rows: int, expected: str
) -> None:
    lens = np.ones(num_rows, dtype=np.int32)
    nothing = torch.zeros(num_rows, dtype=torch.int64)
    batch = Batch(
        input_ids=nothing,
        positions=nothing,
        slots=nothing,
        sample_indices=None,
        rows=nothing,
        num_decode_rows=num_decode,
        query_lens=lens,
        kv_lens=lens,
        kv_lens_device=torch.from_numpy(lens),
        page_table=nothing,
        page_size=1,
    )
    hybrid = HybridBackend(Marked("prefill"), Marked("decode"))
    assert hybrid.attend(nothing, None, hybrid.plan(batch, 1)) == expected  # type: ignore[arg-type]


def test_a_recorded_launch_of_a_hybrid_is_the_decode_backend_s() -> None:
    """Its plan comes from that backend's part in graphs, and from nobody else."""
    asked: list[tuple[str, str]] = []

    class Noting(Marked):
        def attend(self, q, layer, plan, new_kv=None):  # type: ignore[no-untyped-def,override]
            asked.append((self.name, plan))
            return q

    hybrid, q = HybridBackend(Noting("prefill"), Noting("decode")), torch.zeros(1)
    hybrid.attend(q, None, "as recorded")  # type: ignore[arg-type]
    assert asked == [("decode", "as recorded")]


def test_a_pair_of_which_one_stores_and_one_does_not_is_refused_with_both_named() -> None:
    class Storing(Marked):
        store_fusion = True

    with pytest.raises(UnsupportedBackendError, match="Marked and Storing cannot be a pair"):
        HybridBackend(Marked("prefill"), Storing("decode"))
