"""Object files as FlashAttention 4 exports them, compiled from C for the CPU."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@dataclass(frozen=True)
class KernelObjects:
    """Files in a folder of a test's.

    Attributes:
        right: computes attention.
        wrong: is off by a thousandth.
        lame: needs a symbol that nobody has.
        runtime: the library that both need.
    """

    right: Path
    wrong: Path
    lame: Path
    runtime: Path


def compile_objects(folder: Path) -> KernelObjects:
    """Compile them."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    common = ["cc", "-O2", "-fPIC", "-I", str(Path(tvm_ffi.__file__).parent / "include")]

    def compile_one(name: str, source: str, *flags: str) -> Path:
        path = folder / name
        command = [*common, *flags, str(Path(__file__).parent / source), "-o", str(path)]
        subprocess.run(command, check=True)
        return path

    return KernelObjects(
        right=compile_one("right.o", "fake_kernel.c", "-c"),
        wrong=compile_one("wrong.o", "fake_kernel.c", "-c", "-DFAULT=1e-3"),
        lame=compile_one("lame.o", "fake_kernel.c", "-c", "-Dfake_runtime_is_loaded=nobody_has_it"),
        runtime=compile_one("libfake_runtime.so", "fake_runtime.c", "-shared"),
    )
