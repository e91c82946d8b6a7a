"""An engine starts only with attention backends that read its pool's pages."""

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import UnsupportedBackendError
from support import plugin_code
from support.tiny_models import write_tiny_model

POOL = """
from minisgl.plugins import Capabilities, KVPoolRecord, NoSettings, Supported, hookimpl

def create(spec, settings):
    from minisgl.kvcache.mha_pool import MHAKVCachePool
    return MHAKVCachePool(spec)

@hookimpl
def minisgl_kv_pools():
    yield KVPoolRecord(
        name="by-head", summary="A test's pool", settings_type=NoSettings,
        probe=lambda query: Supported(1, 1), create=create,
        capabilities=Capabilities(kv_layout="HND"),
    )
"""


@pytest.fixture
def start(plugin_site, tmp_path):
    plugin_site.add("acme-attn", plugin_code.attention("hnd", kv_layout="HND"))
    plugin_site.add("acme-pool", POOL)
    model = write_tiny_model(tmp_path / "model", "Qwen3ForCausalLM")

    def start(**settings) -> LLM:
        return LLM(str(model), device="cpu", num_pages=40, progress=False, **settings)

    return start


def test_a_pair_of_two_layouts_does_not_start(start):
    with pytest.raises(UnsupportedBackendError, match="cannot be a pair: 'torch' reads pages of"):
        start(attention_backend="torch,hnd")


def test_a_backend_of_another_layout_than_the_pool_s_does_not_start(start):
    with pytest.raises(UnsupportedBackendError, match="needs KV layout HND, found NHD"):
        start(attention_backend="hnd")
    with pytest.raises(UnsupportedBackendError, match="needs KV layout NHD, found HND"):
        start(attention_backend="torch", cache={"pool": "by-head"})


def test_auto_passes_over_it_and_runs(start, caplog):
    with caplog.at_level("INFO"), start() as llm:
        (result,) = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=2))
    assert len(result.token_ids) == 2
    assert "needs KV layout HND, found NHD" in caplog.text
