"""A stand-in for installed FlashAttentions: their files and metadata, without a line of code."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl.plugins import BackendQuery

REFUSES = "raise AssertionError('a probe must not import FlashAttention')\n"


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


class FlashAttnSite:
    """A folder on ``sys.path``; what the environment itself has of these packages is not seen."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        root.mkdir(parents=True)
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(root))
        for name in [*sys.modules]:
            if name.split(".")[0] in {"flash_attn", "flash_attn_interface"}:
                monkeypatch.delitem(sys.modules, name)

    def fa4(self, version: str = "4.0.0b36") -> None:
        """Install version 4: a folder without ``__init__.py``, and what it needs."""
        self._distribution("flash_attn_4", version)
        self._files("flash_attn/cute/__init__.py", "flash_attn/cute/paged_kv.py")
        for module in ("cutlass", "quack", "tvm_ffi"):
            self._files(f"{module}/__init__.py")

    def fa3(self, version: str = "3.0.0b1") -> None:
        """Install version 3, a single module."""
        self._distribution("flash_attn_3", version)
        self._files("flash_attn_interface.py")

    def fa2(self, version: str = "2.8.3") -> None:
        """Install version 2: a package, with a ``cute`` of its own."""
        self._distribution("flash_attn", version)
        self._files("flash_attn/__init__.py", "flash_attn/flash_attn_interface.py")
        self._files("flash_attn/cute/__init__.py")

    def _distribution(self, name: str, version: str) -> None:
        info = self.root / f"{name}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)

    def _files(self, *names: str) -> None:
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(REFUSES)
        importlib.invalidate_caches()
