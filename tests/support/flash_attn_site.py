"""A stand-in for installed FlashAttentions: their files and metadata, without a line of code."""

import sys
from pathlib import Path
from typing import Final

import pytest

from support.kernel_site import KernelSite

REFUSES: Final = "raise AssertionError('a probe must not import FlashAttention')\n"


class FlashAttnSite(KernelSite):
    """A folder on ``sys.path``; what the environment itself has of these packages is not seen."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root, monkeypatch)
        for name in [*sys.modules]:
            if name.split(".")[0] in {"flash_attn", "flash_attn_interface"}:
                monkeypatch.delitem(sys.modules, name)

    def fa4(self, version: str = "4.0.0b36") -> None:
        """Install version 4: a folder without ``__init__.py``, and what it needs."""
        files = ["flash_attn/cute/__init__.py", "flash_attn/cute/paged_kv.py"]
        files += [f"{module}/__init__.py" for module in ("cutlass", "quack", "tvm_ffi")]
        self.distribution("flash-attn-4", version, *files, code=REFUSES)

    def fa3(self, version: str = "3.0.0b1") -> None:
        """Install version 3, a single module."""
        self.distribution("flash-attn-3", version, "flash_attn_interface.py", code=REFUSES)

    def fa2(self, version: str = "2.8.3") -> None:
        """Install version 2: a package, with a ``cute`` of its own."""
        names = ("__init__.py", "flash_attn_interface.py", "cute/__init__.py")
        files = [f"flash_attn/{name}" for name in names]
        self.distribution("flash-attn", version, *files, code=REFUSES)
