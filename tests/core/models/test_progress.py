"""Progress bars of loading."""

import subprocess
import sys

import pytest

SCRIPT = """
from pathlib import Path
from minisgl.models.progress import progress_bar
list(progress_bar(range(3), show=True))
print("/dev/shm/sem." in Path("/proc/self/maps").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_bar_holds_no_semaphore_of_the_machine() -> None:
    """One that is killed with its whole group would leave it in /dev/shm for good."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr
