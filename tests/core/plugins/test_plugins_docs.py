"""docs/plugins.md names every hook and stage, and its example works."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from minisgl.attention import AttentionContext, AttentionLayerSpec, Batch
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.errors import UnsupportedBackendError
from minisgl.kvcache import KVPoolSpec, MHAKVCachePool
from minisgl.plugins import BackendQuery, HookSpecs
from minisgl.plugins.failure import Stage
from minisgl.plugins.loading import HOOK_NAMES
from minisgl.plugins.selection import select_attention

TEXT = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text()
PAGE_SIZE = 4


def block(name: str) -> str:
    """Return the first code block after the mention of a file's name at the start of a line."""
    found = re.search(rf"^`{re.escape(name)}`.*?```\w+\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    assert found, name
    return found[1]


@pytest.fixture
def example(plugin_site):
    project = tomllib.loads(block("pyproject.toml"))["project"]
    points = [f"{k} = {v}" for k, v in project["entry-points"]["minisgl"].items()]
    plugin_site.add(
        project["name"],
        "",
        version=project["version"],
        requires=project["dependencies"],
        entry_points=points,
    )
    package = plugin_site.root / "acme_attn"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("plugin", "backend"):
        (package / f"{name}.py").write_text(block(f"acme_attn/{name}.py"))
        plugin_site.modules.add(f"acme_attn.{name}")
    plugin_site.modules.add("acme_attn")
    return plugin_site


def query(head_dim: int = 8) -> BackendQuery:
    return BackendQuery(
        device="cpu",
        compute_capability=None,
        dtype="float32",
        kv_dtype="float32",
        page_size=PAGE_SIZE,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
    )


def test_every_hook_has_a_heading_with_its_arguments():
    headings = re.findall(r"^### `(.*)`", TEXT, re.MULTILINE)
    expected = []
    for name in HOOK_NAMES:
        code = getattr(HookSpecs, name).__code__
        expected.append(f"{name}({', '.join(code.co_varnames[1 : code.co_argcount])})")
    assert headings == expected


def test_every_stage_is_explained():
    table = TEXT[TEXT.index("| stage |") :]
    assert re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE) == list(get_args(Stage))


def test_the_example_s_plugin_module_imports_no_torch(example):
    done = example.python("import acme_attn.plugin", blocked=("torch", "transformers"))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_example_is_chosen_for_prefill_and_takes_its_options(example):
    host = example.load(strict=True)
    selection = select_attention(host, query(), "auto", {"plain": {"upcast": "false"}})
    assert (selection.prefill.name, selection.decode.name) == ("plain", "torch")
    assert selection.prefill_settings.upcast is False
    with pytest.raises(UnsupportedBackendError, match="needs a head dim that 8 divides, found 12"):
        select_attention(host, query(12), "plain")


def test_the_example_attends_as_the_reference_does(example):
    generator = torch.Generator().manual_seed(0)
    pool = MHAKVCachePool(
        KVPoolSpec(
            num_layers=1,
            num_kv_heads=2,
            head_dim=8,
            page_size=PAGE_SIZE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    )
    pool.allocate(12)
    for tensor in pool.layer(0):
        tensor.normal_(generator=generator)
    context = AttentionContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_layers=1,
        page_size=PAGE_SIZE,
        kv_pool=pool,
        max_running_requests=4,
        max_seq_len=16,
    )
    page_table = torch.tensor([[5, 2, 0, 0], [7, 1, 3, 0], [4, 6, 8, 9]], dtype=torch.int32)
    batch = Batch(
        input_ids=torch.zeros(8, dtype=torch.long),
        positions=torch.tensor([6, 9, 0, 1, 2, 11, 12, 13]),
        slots=torch.full((8,), -1),
        sample_indices=None,
        rows=torch.tensor([0, 1, 2, 1]),
        num_decode_rows=2,
        query_lens=np.array([1, 1, 3, 3], dtype=np.int32),
        kv_lens=np.array([7, 10, 14, 3], dtype=np.int32),
        kv_lens_device=torch.tensor([7, 10, 14, 3], dtype=torch.int32),
        page_table=page_table,
        page_size=PAGE_SIZE,
    )
    layer = AttentionLayerSpec(index=0, num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
    record = select_attention(example.load(), query(), "plain").prefill
    q = torch.randn(8, 4, 8, generator=generator)
    backends = (record.create(context, record.settings_type()), TorchAttentionBackend(context))
    results = [backend.attend(q, layer, backend.plan(batch, 0)) for backend in backends]
    torch.testing.assert_close(*results)


def test_the_example_s_tests_pass(example):
    names: dict = {}
    exec(block("tests/test_plain.py"), names)
    suite = names["TestPlain"]()
    suite.test_decode(16, 4, 64)
    suite.test_prefill_behind_a_cached_prefix(1, 1, 64)
    suite.test_decode_and_prefill_in_one_launch(16, 4, 64)
    suite.test_many_launches_behind_a_stalled_stream()
