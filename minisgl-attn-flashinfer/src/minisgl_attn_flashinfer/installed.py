"""What of FlashInfer is installed, found without importing it.

FlashInfer loads a module that was compiled ahead of time, or compiles it with nvcc and ninja when
it is first asked for. It looks in the places that ``flashinfer/jit/env.py`` and ``cpp_ext.py``
list for version 0.6; the functions here look in the same places, in the same order, and read the
same variables of the environment.
"""

import os
import shutil
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

DISTRIBUTION = "flashinfer-python"
TESTED = SpecifierSet(">=0.6.12,<0.7")
"""Versions that the contract suite passed with on a card; as in this distribution's needs."""


def flashinfer_version() -> str | None:
    """Return the installed version; ``None`` if there is none."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def why_unusable() -> str | None:
    """Return why FlashInfer cannot be used at all, and the way out; ``None`` if it can."""
    found = flashinfer_version()
    if found is None or find_spec("flashinfer") is None:
        return f"needs {DISTRIBUTION}{TESTED}, which is not installed: pip install {DISTRIBUTION}"
    try:
        tested = Version(found) in TESTED
    except InvalidVersion:
        tested = False
    if not tested:
        return (
            f"is tested with {DISTRIBUTION}{TESTED}, found {found}, which is untested: "
            f"pip install '{DISTRIBUTION}{TESTED}'"
        )
    if find_spec("tvm_ffi") is None:
        return (
            f"{DISTRIBUTION} {found} needs apache-tvm-ffi, which is not installed: pip install it"
        )
    return _mismatch(found)


def precompiled(module: str) -> bool:
    """Whether a module was compiled ahead of time and comes with an installed package."""
    folder = _precompiled_folder()
    return folder is not None and (folder / module / f"{module}.so").is_file()


def why_not_compilable() -> str | None:
    """Return what is missing to compile a module; ``None`` if FlashInfer can try."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set"
    nvcc = _nvcc()
    if nvcc is None or not nvcc.is_file():
        return f"no nvcc at {nvcc}" if nvcc else "no nvcc"
    if shutil.which("ninja") is None:
        return "no ninja on PATH"
    return None


def why_missing(module: str) -> str | None:
    """Return why a module can neither be loaded nor compiled; ``None`` if it can."""
    return None if precompiled(module) else why_not_compilable()


def cubins_installed() -> bool:
    """Whether the compiled kernels of trtllm-gen are here; FlashInfer would download them."""
    return find_spec("flashinfer_cubin") is not None


def _mismatch(found: str) -> str | None:
    """Repeat FlashInfer's check of its companions, which fails its import."""
    if os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return None
    for companion in ("flashinfer-jit-cache", "flashinfer-cubin"):
        if find_spec(companion.replace("-", "_")) is None:
            continue
        try:
            other = version(companion)
        except PackageNotFoundError:
            continue
        if other.partition("+")[0] != found.partition("+")[0]:
            return (
                f"{DISTRIBUTION} {found} and {companion} {other} must have one version: "
                f"install {companion} {found}, or remove it"
            )
    return None


def _precompiled_folder() -> Path | None:
    if find_spec("flashinfer_jit_cache") is not None:
        # A package of nothing but the compiled files: it imports no kernels.
        return Path(import_module("flashinfer_jit_cache").get_jit_cache_dir())
    spec = find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "data" / "aot"


def _nvcc() -> Path | None:
    chosen = os.environ.get("FLASHINFER_NVCC")
    if chosen:
        return Path(shutil.which(chosen) or chosen)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else Path("/usr/local/cuda/bin/nvcc")
