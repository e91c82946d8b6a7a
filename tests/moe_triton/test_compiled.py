"""Every kernel that a server may need has been compiled before it serves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(cache: Path, *script: str) -> str:
    """Run a module without Triton's interpreter, and return what it prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", *script], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_no_number_of_tokens_needs_a_kernel_that_the_start_has_not(
    tmp_path: Path, dtype: str
) -> None:
    """Catches: a size that is compiled in, a block of the sort that the start does not use."""
    found = json.loads(run(tmp_path, "support.moe_keys", str(tmp_path), dtype))
    assert found["at_start"] >= 10
    assert found["later"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "least", "spilled"), [(89, 8, 256), (90, 16, 0)])
def test_launches_in_fp8_compile_for_a_card_and_stay_in_its_registers(
    tmp_path: Path, capability: int, least: int, spilled: int
) -> None:
    """Catches: what the interpreter takes and the compiler does not; products that are none of fp8;
    sums of products that have not ended, as Triton 3.6 makes of two with ``max_num_imprecise_acc``.
    """
    lines = run(tmp_path, "support.compile_moe", str(capability)).splitlines()
    compiled = [json.loads(line) for line in lines]
    products = [one for one in compiled if one["kernel"] == "_grouped_kernel"]
    assert len(products) >= least
    assert all(one["fp8_products"] for one in products)
    assert all(one["fits"] for one in compiled)
    assert {one["kernel"] for one in compiled} >= {
        "_few_gate_up_kernel", "_few_down_kernel", "_quantize_kernel",
    }  # fmt: skip
    assert [one for one in compiled if one["spilled"] > spilled] == []
    assert [one for one in compiled if one["early_reads"]] == []
