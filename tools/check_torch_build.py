"""Stops an installation that would fetch gigabytes of CUDA onto a machine without a GPU.

Reads what ``pip install --dry-run --report`` would install for torch: the CUDA builds for Linux
require NVIDIA's packages, the CPU builds do not.
"""

import json
import sys
from pathlib import Path


def main() -> int:
    """Return 0 if the report names a CPU build, else 1 with what to do."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for package in report["install"]:
        metadata = package["metadata"]
        needs = " ".join(metadata.get("requires_dist", ())).lower()
        if sys.platform == "linux" and ("nvidia-" in needs or "cuda-" in needs):
            print(
                f"There is no NVIDIA GPU here, but torch {metadata['version']} from your package "
                "index is a CUDA build of several gigabytes.\nName PyTorch's index of CPU builds "
                "(README.md, 'Installing'): make TORCH_INDEX=URL serve",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
