"""The plugin module of minisgl-attn-flashinfer: light, honest about its range, and explained."""

import json
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from pydantic import ValidationError

from minisgl.cli import main
from minisgl.plugins.capabilities import unmet_requirement
from minisgl_attn_flashinfer import installed
from minisgl_attn_flashinfer.plugin import minisgl_attention_backends
from minisgl_attn_flashinfer.settings import FlashInferSettings
from support.distributions import project
from support.kernel_site import query
from support.tiny_models import write_tiny_model

FOLDER = "minisgl-attn-flashinfer"


def test_plugin_and_probe_import_neither_torch_nor_flashinfer():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'flashinfer', 'tvm_ffi', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "import minisgl_attn_flashinfer.plugin as plugin\n"
        "from minisgl.plugins import BackendQuery\n"
        "for record in plugin.minisgl_attention_backends():\n"
        "    print(record.probe(BackendQuery(device='cuda', compute_capability=(9, 0),\n"
        "        dtype='bfloat16', kv_dtype='bfloat16', page_size=16, num_q_heads=16,\n"
        "        num_kv_heads=8, head_dim=128)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.lower().count("supported") == 2


def test_the_tested_range_is_the_one_that_pip_is_asked_for():
    needs = [Requirement(line) for line in project(FOLDER)["dependencies"]]
    (needed,) = [need for need in needs if need.name == installed.DISTRIBUTION]
    assert needed.specifier == installed.TESTED


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "cpu", "compute_capability": None}, "needs device cuda, found cpu"),
        ({"compute_capability": (7, 5)}, "needs compute capability 8.0, found 7.5"),
        ({"compute_capability": None}, "needs compute capability 8.0, found none"),
        ({"dtype": "float32"}, "needs dtype bfloat16 or float16, found float32"),
        ({"head_dim": 96}, "needs head dim 64, 128 or 256, found 96"),
        ({"sliding_window": True}, "the model has sliding-window layers, it implements none"),
        ({"logit_soft_cap": True}, "the model caps attention scores, it does not implement that"),
        ({"page_size": 1}, None),
        ({"page_size": 256}, None),
    ],
)
def test_core_refuses_what_the_record_does_not_declare(changed, reason):
    record, _ = minisgl_attention_backends()
    for phase in ("prefill", "decode"):
        assert unmet_requirement(record.capabilities, query(**changed), phase) == reason


@pytest.mark.parametrize(
    "values", [{"decode_kernel": "cudnn"}, {"workspace_mib": 0}, {"prefil_template": "fa2"}]
)
def test_settings_refuse_what_they_do_not_know(values):
    with pytest.raises(ValidationError):
        FlashInferSettings(**values)


def test_explain_works_without_a_gpu_and_without_flashinfer(plugin_site, capsys, tmp_path):
    plugin_site.add("minisgl-attn-flashinfer", "", entry_points=[f"a = {PLUGIN}"])
    model = write_tiny_model(tmp_path / "model", "Qwen3ForCausalLM")
    arguments = ["plugins", "explain", "attention", "--model", str(model), "--device", "cuda"]
    arguments += ["--compute-capability", "9.0", "--dtype", "bfloat16", "--json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["decisions"]
    (prefill, _) = [row for row in rows if row["name"] == "flashinfer"]
    assert prefill["outcome"] == "refused"
    assert "needs head dim" in prefill["reason"] or "flashinfer-python" in prefill["reason"]


PLUGIN = "minisgl_attn_flashinfer.plugin"
