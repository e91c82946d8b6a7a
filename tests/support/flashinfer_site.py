"""A stand-in for an installed FlashInfer: its folders and metadata, without a line of code."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from minisgl.plugins import BackendQuery
from minisgl_attn_flashinfer.modules import (
    TRTLLM_GEN_MODULE,
    decode_module,
    prefill_module,
    xqa_module,
)

VARIABLES = (
    *("FLASHINFER_NVCC", "FLASHINFER_DISABLE_JIT", "FLASHINFER_DISABLE_VERSION_CHECK"),
    *("CUDA_HOME", "CUDA_PATH"),
)

MODULES = {
    "fa2": prefill_module("fa2", "bfloat16", 128),
    "fa3": prefill_module("fa3", "bfloat16", 128),
    "decode": decode_module("bfloat16", 128),
    "xqa": xqa_module("bfloat16", page_size=16, head_dim=128, group=2),
    "gen": TRTLLM_GEN_MODULE,
}


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


class FlashInferSite:
    """A folder on ``sys.path``; nothing of the machine's own CUDA is seen."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        self.tools = root / "tools"
        self.tools.mkdir(parents=True)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CUDA_HOME", str(root / "cuda"))
        monkeypatch.setenv("PATH", str(self.tools))
        monkeypatch.syspath_prepend(str(root))

    def distribution(self, name: str, version: str, package: str, code: str = "") -> Path:
        """Write a distribution of one package; returns the package's folder."""
        folder = self.root / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(code)
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
        importlib.invalidate_caches()
        return folder

    def flashinfer(self, version: str = "0.6.12", *, compiled: tuple[str, ...] = ()) -> None:
        """Install FlashInfer and what it loads modules with; importing it is an error."""
        code = "raise AssertionError('a probe must not import FlashInfer')"
        folder = self.distribution("flashinfer-python", version, "flashinfer", code)
        self.distribution("apache-tvm-ffi", "0.1.15", "tvm_ffi", code)
        self.compiled(folder / "data" / "aot", compiled)

    def compiled(self, folder: Path, modules: tuple[str, ...]) -> None:
        """Put compiled modules into a folder, by their key in ``MODULES``."""
        for key in modules:
            name = MODULES[key]
            (folder / name).mkdir(parents=True)
            (folder / name / f"{name}.so").touch()

    def compiler(self, *, nvcc: bool = True, ninja: bool = True) -> None:
        """Install what FlashInfer compiles with."""
        wanted = {self.root / "cuda" / "bin" / "nvcc": nvcc, self.tools / "ninja": ninja}
        for path, there in wanted.items():
            if there:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("#!/bin/sh\n")
                path.chmod(0o755)
