"""Stand-ins for installed kernel packages: files and metadata, and what probes are asked."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from minisgl.plugins import BackendQuery


def query(**changed: Any) -> BackendQuery:
    """A model of Qwen3-0.6B's shape on a Hopper card, but for what is changed."""
    values = {
        "device": "cuda",
        "compute_capability": (9, 0),
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "page_size": 16,
        "num_q_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
    }
    return BackendQuery(**{**values, **changed})


class KernelSite:
    """A folder on ``sys.path``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        root.mkdir(parents=True)
        monkeypatch.syspath_prepend(str(root))

    def distribution(self, name: str, version: str, *files: str, code: str = "") -> None:
        """Install a distribution whose ``files`` all hold ``code``."""
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
        self.files(*files, code=code)

    def files(self, *names: str, code: str = "") -> None:
        """Write files below the folder."""
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        importlib.invalidate_caches()
