"""A stand-in for an installed FlashInfer: its folders and metadata, without a line of code."""

from pathlib import Path

import pytest

from minisgl_attn_flashinfer.modules import (
    TRTLLM_GEN_MODULE,
    decode_module,
    prefill_module,
    xqa_module,
)
from support.kernel_site import KernelSite

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


class FlashInferSite(KernelSite):
    """A folder on ``sys.path``; nothing of the machine's own CUDA is seen."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root, monkeypatch)
        self.tools = root / "tools"
        self.tools.mkdir()
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CUDA_HOME", str(root / "cuda"))
        monkeypatch.setenv("PATH", str(self.tools))

    def flashinfer(self, version: str = "0.6.12", *, compiled: tuple[str, ...] = ()) -> None:
        """Install FlashInfer and what it loads modules with; importing it is an error."""
        code = "raise AssertionError('a probe must not import FlashInfer')"
        self.distribution("flashinfer-python", version, "flashinfer/__init__.py", code=code)
        self.distribution("apache-tvm-ffi", "0.1.15", "tvm_ffi/__init__.py", code=code)
        self.compiled(self.root / "flashinfer" / "data" / "aot", compiled)

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
