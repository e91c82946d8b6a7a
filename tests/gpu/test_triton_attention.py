"""The backend ``triton`` on a card: the contract, and an engine without any other package."""

from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.attention.by_rows import DecodeByRows
from minisgl.attention.hybrid import HybridBackend
from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.attention.triton_backend import TritonAttentionBackend
from minisgl.engine.engine import Engine
from minisgl.testing.attention_contract import AttentionBackendContract
from support.judged import check_judged
from support.tiny_models import WIDE, write_tiny_model

pytestmark = pytest.mark.gpu


class Triton(AttentionBackendContract):
    device = "cuda"
    num_kv_heads = 8
    mixed_batches = True
    graph_sizes = (1, 2, 5, 16, 33, 64, 200)

    def create(self, context: AttentionContext) -> AttentionBackend:
        return TritonAttentionBackend(context)


class TestBfloat16(Triton):
    dtype = torch.bfloat16


class TestFloat16(Triton):
    dtype = torch.float16
    page_sizes = (16,)
    groups = (4,)
    head_dims = (80, 256)


class TestFloat32(Triton):
    dtype = torch.float32
    page_sizes = (16,)
    groups = (2,)
    head_dims = (64,)


class Paired(Triton):
    """Two backends behind one: each phase's launches, recorded ones too, are the right one's."""

    dtype = torch.bfloat16
    page_sizes = (16,)
    groups = (2, 5)
    head_dims = (128,)

    def others(self, context: AttentionContext) -> AttentionBackend:
        create = pytest.importorskip("minisgl_attn_flashinfer.create").create_backend
        settings = pytest.importorskip("minisgl_attn_flashinfer.settings").FlashInferSettings()
        backend: AttentionBackend = create(context, settings)
        return backend


class TestBehindFlashInfersPrefill(Paired):
    def create(self, context: AttentionContext) -> AttentionBackend:
        return HybridBackend(self.others(context), TritonAttentionBackend(context))


class TestGraphsOfBoth(Paired):
    """Few rows attend through the one, many through the other."""

    def create(self, context: AttentionContext) -> AttentionBackend:
        triton, others = TritonAttentionBackend(context), self.others(context)

        def measure(backend: AttentionBackend, context: AttentionContext, rows: int) -> float:
            return float(rows) if backend is triton else 20.0

        by_rows = DecodeByRows({"others": others, "triton": triton}, context, measure)
        return HybridBackend(others, others, by_rows)


class TestBeforeFlashInfersDecode(Paired):
    def create(self, context: AttentionContext) -> AttentionBackend:
        return HybridBackend(TritonAttentionBackend(context), self.others(context))


def test_backends_that_nobody_named_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    path = write_tiny_model(tmp_path / "qwen3", "Qwen3ForCausalLM", **WIDE)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(
        str(path), device="cuda", dtype="bfloat16", num_pages=2000, max_running_requests=24,
        progress=False,
    ) as llm:  # fmt: skip
        assert isinstance(llm.engine, Engine)
        assert llm.engine.graphs is not None
        chosen = llm.engine.graphs._graphs
        assert isinstance(chosen, DecodeByRows)
        assert sorted(chosen._fastest) == [1, 2, 4, 8, 16, 24]
        prompts = [[5, 6, 7] * n for n in range(1, 20)]
        results = llm.generate(prompts, params, progress=False)
        assert all(len(one.token_ids) == 12 for one in results)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_mixture_of_experts_starts_and_runs_eagerly(backend: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "moe", "Qwen3MoeForCausalLM", **WIDE)
    with LLM(
        str(path), device="cuda", dtype="bfloat16", attention_backend=backend, num_pages=300,
        max_running_requests=8, progress=False, moe={"backend": "torch"},
    ) as llm:  # fmt: skip
        assert isinstance(llm.engine, Engine)
        assert llm.engine.graphs is None
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        (result,) = llm.generate([[5, 6, 7]], params, progress=False)
        assert len(result.token_ids) == 5


def test_decode_is_recorded_without_another_package(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "qwen3", "Qwen3ForCausalLM", **WIDE)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7] * n for n in range(1, 9)]
    with LLM(
        str(path), device="cuda", dtype="bfloat16", attention_backend="triton", num_pages=300,
        max_running_requests=8, progress=False,
    ) as llm:  # fmt: skip
        assert isinstance(llm.engine, Engine)
        assert llm.engine.graphs is not None
        results = llm.generate(prompts, params, progress=False)
        check_judged(llm, prompts, [one.token_ids for one in results])
