"""The plugin module of minisgl-moe-triton: light, honest about its range, and explained."""

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.cli import main
from minisgl.plugins.capabilities import unmet_requirement, unmet_weights_dtype
from minisgl.plugins.records import BackendQuery
from minisgl_moe_triton.plugin import minisgl_moe_backends
from minisgl_moe_triton.settings import TritonMoeSettings
from support.tiny_models import write_tiny_model

PLUGIN = "minisgl_moe_triton.plugin"


def query(**changes: Any) -> BackendQuery:
    values: dict[str, Any] = {
        "device": "cuda", "compute_capability": (9, 0), "dtype": "bfloat16",
        "kv_dtype": "bfloat16", "page_size": 16, "num_q_heads": 32, "num_kv_heads": 4,
        "head_dim": 128, "num_experts": 128,
    }  # fmt: skip
    return BackendQuery(**{**values, **changes})


def test_without_triton_it_says_so_and_imports_nothing_heavy():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'triton', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "import minisgl_moe_triton.plugin as plugin\n"
        "(record,) = plugin.minisgl_moe_backends()\n"
        "print(record.probe(None))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Unsupported" in done.stdout
    assert "pip install triton" in done.stdout


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"dtype": "float16", "compute_capability": (8, 0)}, None),
        ({"sliding_window": True, "logit_soft_cap": True}, None),
        ({"device": "cpu", "compute_capability": None}, "needs device cuda, found cpu"),
        ({"compute_capability": (7, 5)}, "needs compute capability 8.0, found 7.5"),
        ({"dtype": "float32"}, "needs dtype bfloat16 or float16, found float32"),
    ],
)
def test_core_refuses_what_the_record_does_not_declare(changed, reason):
    (record,) = minisgl_moe_backends()
    assert unmet_requirement(record.capabilities, query(**changed)) == reason


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((8, 0), None, None),
        ((8, 9), "float8_e4m3fn", None),
        ((9, 0), "float8_e4m3fn", None),
        ((8, 0), "float8_e4m3fn", "float8_e4m3fn need compute capability 8.9, found 8.0"),
        ((9, 0), "int4", "needs experts in bfloat16 or float8_e4m3fn, found int4"),
    ],
)
def test_it_runs_experts_in_fp8_where_the_card_knows_it(capability, dtype, reason):
    (record,) = minisgl_moe_backends()
    asked = query(compute_capability=capability, moe_weights_dtype=dtype)
    found = unmet_weights_dtype(record, asked)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


@pytest.mark.parametrize("values", [{"tuned_foldr": "x"}, {"tuned_folder": 3}])
def test_settings_refuse_what_they_do_not_know(values):
    with pytest.raises(ValidationError):
        TritonMoeSettings(**values)


def test_it_is_chosen_on_a_card_before_the_reference(plugin_site, capsys, tmp_path):
    pytest.importorskip("triton")
    plugin_site.add("minisgl-moe-triton", "", entry_points=[f"moe = {PLUGIN}"])
    model = write_tiny_model(tmp_path / "model", "Qwen3MoeForCausalLM")
    arguments = ["plugins", "explain", "moe", "--model", str(model), "--device", "cuda"]
    arguments += ["--compute-capability", "9.0", "--dtype", "bfloat16", "--json"]
    assert main(arguments) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["decisions"]}
    assert rows["triton"]["outcome"] == "chosen"
    assert rows["torch"]["outcome"] != "chosen"
