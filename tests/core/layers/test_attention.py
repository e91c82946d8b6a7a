"""The attention layer's ways to rotate and store, which must be one in effect."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from minisgl.kernel import OpTable
from minisgl.kvcache.mha_pool import MHAKVCachePool
from support import forward
from support.tiny_models import write_tiny_model

PROMPT = [7, 3, 99, 12, 5]


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", "Qwen2ForCausalLM"])
def folder(request, tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), request.param)


def logits_and_pool(folder):
    model, context = forward.load_model(folder, max_seq_len=64)
    logits = forward.logits_of(model, context, PROMPT)
    layers = range(context.kv_pool.spec.num_layers)
    return logits, [part.clone() for index in layers for part in context.kv_pool.layer(index)]


def with_ops(monkeypatch, ops):
    build = forward.build_context
    monkeypatch.setattr(
        forward, "build_context", lambda *args, **options: replace(build(*args, **options), ops=ops)
    )


def test_a_pool_that_is_not_plain_tensors_stores_by_itself(folder, monkeypatch):
    expected, pool = logits_and_pool(folder)
    stored = []
    store = MHAKVCachePool.store

    def noting(self, k, v, slots, layer):
        stored.append(layer)
        store(self, k, v, slots, layer)

    monkeypatch.setattr(MHAKVCachePool, "flat_layer", lambda self, index: None)
    monkeypatch.setattr(MHAKVCachePool, "store", noting)
    logits, other = logits_and_pool(folder)
    assert stored
    assert torch.equal(logits, expected)
    assert all(map(torch.equal, pool, other))


def test_a_plain_pool_is_written_by_one_operation(folder, monkeypatch):
    expected, _ = logits_and_pool(folder)

    def refuse(*arguments, **keywords):
        raise AssertionError("rotation and store are one operation")

    with_ops(monkeypatch, OpTable(rope=refuse, store_kv=refuse))
    assert torch.equal(logits_and_pool(folder)[0], expected)


def test_a_model_on_triton_kernels_has_the_same_logits(folder, monkeypatch):
    """All layers together, interpreted where there is no card."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has this with real kernels")
    from minisgl.kernel import triton

    expected, pool = logits_and_pool(folder)
    with_ops(monkeypatch, OpTable(**{name: getattr(triton, name) for name in triton.__all__}))
    with np.errstate(all="ignore"):
        logits, other = logits_and_pool(folder)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(other, pool, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
