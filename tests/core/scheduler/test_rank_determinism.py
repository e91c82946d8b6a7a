"""Invariant 13: equal messages give byte-identical plans, whatever the hash seed."""

import os
import subprocess
import sys
from pathlib import Path

from support.plan_digest import digest


def test_invariant_13_plans_do_not_depend_on_the_hash_seed() -> None:
    """Catches: running rows kept in a set, order taken from identity or hashes."""
    digests = {digest()}
    for seed in ("0", "1", "77"):
        done = subprocess.run(
            [sys.executable, "-m", "support.plan_digest"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1
