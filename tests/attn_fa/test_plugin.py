"""The plugin module of minisgl-attn-fa: light, honest about its range, and explained."""

import json
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from pydantic import ValidationError

from minisgl.cli import main
from minisgl.plugins.capabilities import unmet_requirement
from minisgl_attn_fa.installed import RELEASES
from minisgl_attn_fa.plugin import minisgl_attention_backends
from minisgl_attn_fa.settings import FaSettings
from support.distributions import project
from support.kernel_site import query
from support.tiny_models import write_tiny_model

FOLDER = "minisgl-attn-fa"
PLUGIN = "minisgl_attn_fa.plugin"


def test_plugin_and_probe_import_neither_torch_nor_flash_attention():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'flash_attn', 'cutlass', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "import minisgl_attn_fa.plugin as plugin\n"
        "from minisgl.plugins import BackendQuery\n"
        "(record,) = plugin.minisgl_attention_backends()\n"
        "print(record.probe(BackendQuery(device='cuda', compute_capability=(8, 0),\n"
        "    dtype='bfloat16', kv_dtype='bfloat16', page_size=16, num_q_heads=16,\n"
        "    num_kv_heads=8, head_dim=128)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Unsupported" in done.stdout


def test_the_tested_ranges_are_those_that_pip_is_asked_for():
    extras = project(FOLDER)["optional-dependencies"]
    assert sorted(extras) == ["fa2", "fa4"]
    for name, lines in extras.items():
        (needed,) = [Requirement(line) for line in lines]
        assert needed.name == RELEASES[name].distribution
        assert needed.specifier == RELEASES[name].tested


def test_it_installs_without_any_flash_attention():
    needs = [Requirement(line).name for line in project(FOLDER)["dependencies"]]
    assert needs == ["minisgl-core"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "cpu", "compute_capability": None}, "needs device cuda, found cpu"),
        ({"compute_capability": (7, 5)}, "needs compute capability 8.0, found 7.5"),
        ({"dtype": "float32"}, "needs dtype bfloat16 or float16, found float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "needs KV dtype bfloat16 or float16, found float8_e4m3fn"),
        ({"page_size": 1}, None),
        ({"sliding_window": True, "logit_soft_cap": True}, None),
    ],
)
def test_core_refuses_what_the_record_does_not_declare(changed, reason):
    (record,) = minisgl_attention_backends()
    for phase in ("prefill", "decode"):
        assert unmet_requirement(record.capabilities, query(**changed), phase) == reason


@pytest.mark.parametrize(
    ("value", "name"), [("auto", "auto"), (4, "fa4"), ("3", "fa3"), ("fa2", "fa2")]
)
def test_a_version_is_a_number_or_a_name(value, name):
    assert FaSettings(version=value).version == name


@pytest.mark.parametrize("values", [{"version": "fa5"}, {"version": 1}, {"verson": "fa4"}])
def test_settings_refuse_what_they_do_not_know(values):
    with pytest.raises(ValidationError):
        FaSettings(**values)


def test_explain_says_what_to_install(plugin_site, flash_attn_site, capsys, tmp_path):
    plugin_site.add("minisgl-attn-fa", "", entry_points=[f"a = {PLUGIN}"])
    model = write_tiny_model(tmp_path / "model", "Qwen3ForCausalLM")
    arguments = ["plugins", "explain", "attention", "--model", str(model), "--device", "cuda"]
    arguments += ["--compute-capability", "9.0", "--dtype", "bfloat16", "--json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["decisions"]
    (prefill, decode) = [row for row in rows if row["name"] == "fa"]
    assert prefill["outcome"] == decode["outcome"] == "refused"
    assert "pip install 'minisgl-attn-fa[fa4]'" in prefill["reason"]
