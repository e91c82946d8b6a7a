"""Every kernel that a server may need has been compiled before it serves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_no_number_of_tokens_needs_a_kernel_that_the_start_has_not(tmp_path: Path) -> None:
    """Catches: a size that is compiled in, a block of the sort that the start does not use."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    script = [sys.executable, "-m", "support.moe_keys", str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["at_start"] >= 10
    assert found["later"] == []
