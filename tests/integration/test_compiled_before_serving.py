"""Every kernel that requests need has been compiled before the first of them comes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_models import write_tiny_model

pytest.importorskip("triton")
pytest.importorskip("xgrammar")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rows", [1, 40])
def test_requests_of_all_kinds_need_no_kernel_that_the_start_has_not(
    rows: int, tmp_path: Path
) -> None:
    """Catches: filters that no row of a small server has used, memory that begins elsewhere.

    Without a card: Triton names the kernel of each launch, by what it would compile it for. As on
    one without graphs.
    """
    path = write_tiny_model(tmp_path / "qwen3", "Qwen3ForCausalLM")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    script = [sys.executable, "-m", "support.compiled_keys", str(path), str(rows)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["at_start"] > 20
    assert found["later"] == []
