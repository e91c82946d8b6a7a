"""Plans are data: who is fed the same messages makes the same ones, byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
DIGEST = "from support.plans import digest; print(*digest())"


def test_invariant_13_plans_do_not_depend_on_the_hash_seed() -> None:
    outputs = []
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(done.stdout.split())
    (digest, num_plans, num_retractions), *others = outputs
    assert int(num_plans) > 50
    assert int(num_retractions) > 0, "the schedule has to be one that puts requests back"
    assert all(other == outputs[0] for other in others), digest
