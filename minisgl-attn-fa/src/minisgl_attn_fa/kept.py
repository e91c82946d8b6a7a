"""Compiled kernels of FlashAttention 4, kept so that a later start imports no compiler.

FlashAttention 4 keeps an object file of each kernel, with the code that launches it; but to load
that it imports the CuTe DSL, its LLVM and all kernels that it has, which takes seconds. Linked to a
shared library once, it takes ``tvm_ffi`` and a small library of the DSL's.

In a folder there are, for each kind of launch, a library, which is named after its contents, and a
record: what the library was compiled for, its checksum, and what it is loaded with. Both are
written under other names and renamed; and a record names its library, so that two processes may
keep the same kernel at once.
"""

import ctypes
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from minisgl.attention import AttentionContext

_FORMAT: Final = "1"
"""Of the records."""

_FUNCTION: Final = "func"
"""How FlashAttention 4 names what it exports: ``EXPORT_FUNCTION_PREFIX``."""

_LINKERS: Final = ("cc", "gcc", "clang", "ld")
_LINK_S: Final = 60

_DISTRIBUTIONS: Final = (
    "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13", "quack-kernels",
    "apache-tvm-ffi", "torch",
)  # fmt: skip
"""What takes part in compiling and calling."""

_VARIABLES: Final = ("CUTE_DSL_", "FLASH_ATTENTION_", "FA_")
"""How the environment variables begin that FlashAttention 4 and the DSL read."""

_OF_THE_CACHE: Final = "FLASH_ATTENTION_CUTE_DSL_CACHE_"
"""But for those, which say where kernels are kept."""


class NotKeptError(Exception):
    """There is no kept kernel that can be used; says why.

    Args:
        reason: a clause without a full stop.
        level: at which it belongs into the log: no fault of anybody's is ``logging.INFO``.
    """

    def __init__(self, reason: str, level: int = logging.WARNING) -> None:
        super().__init__(reason)
        self.level = level


@dataclass(frozen=True, slots=True)
class KeptKernels:
    """The kernels for one model's shape on one kind of device.

    Attributes:
        folder: where they are; need not exist.
        facts: see ``facts_of``.
    """

    folder: Path
    facts: Mapping[str, str]

    def load(self, name: str) -> Callable[..., Any]:
        """Return a kernel, loaded.

        Args:
            name: of the kind of launch.

        Raises:
            NotKeptError: there is none for these facts, or it is not what was kept.
        """
        path = self._record(name)
        try:
            record = json.loads(path.read_bytes())
            facts, library = record["facts"], self.folder / Path(record["library"]).name
            checksum, runtimes = record["sha256"], dict(record["runtimes"])
        except (FileNotFoundError, NotADirectoryError):
            raise NotKeptError(
                "no kernels are kept for these versions, this device and this model's shape",
                logging.INFO,
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NotKeptError(f"{path} cannot be read as a record ({error!r})") from error
        if facts != dict(self.facts):
            raise NotKeptError(f"{path} is the record of something else")
        for runtime, size in runtimes.items():
            if _size(Path(runtime)) != size:
                raise NotKeptError(f"{runtime}, which a kept kernel needs, is not as it was")
        try:
            contents = library.read_bytes()
        except OSError as error:
            raise NotKeptError(f"a kept kernel cannot be read: {error}") from error
        if hashlib.sha256(contents).hexdigest() != checksum:
            raise NotKeptError(f"{library} is damaged: its checksum is another than was noted")
        return _load(library, [Path(runtime) for runtime in runtimes])

    def keep(self, name: str, object_file: Path, runtimes: Sequence[Path]) -> None:
        """Keep a kernel.

        Args:
            name: of the kind of launch.
            object_file: as FlashAttention 4 exports it.
            runtimes: libraries that it needs, to be loaded before it.

        Raises:
            NotKeptError: it cannot be linked, or not be written.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                linked = link(object_file, Path(scratch) / "linked.so")
                checksum = hashlib.sha256(linked.read_bytes()).hexdigest()
                library = self.folder / f"{name}-{checksum[:16]}.so"
                record = {
                    "facts": dict(self.facts),
                    "library": library.name,
                    "sha256": checksum,
                    "runtimes": {str(one): one.stat().st_size for one in runtimes},
                }
                written = Path(scratch) / "record.json"
                written.write_text(json.dumps(record, indent=1))
                linked.replace(library)
                written.replace(self._record(name))
        except OSError as error:
            raise NotKeptError(f"its kernels cannot be kept: {error}") from error

    def _record(self, name: str) -> Path:
        facts = json.dumps(dict(self.facts), sort_keys=True).encode()
        return self.folder / f"{name}-{hashlib.sha256(facts).hexdigest()[:16]}.json"


def link(object_file: Path, library: Path) -> Path:
    """Make a shared library of an object file, and return its path.

    Raises:
        NotKeptError: there is no linker, or it fails.
    """
    linker = next(filter(None, map(shutil.which, _LINKERS)), None)
    if linker is None:
        raise NotKeptError(f"linking its kernels takes one of {', '.join(_LINKERS)} on the PATH")
    # A symbol that is missing is an error of loading then, and no end of the process at a call.
    flags = ["-shared", "-z", "now", "-z", "noexecstack"]
    command = [linker, *flags, "-o", str(library), str(object_file)]
    try:
        done = subprocess.run(  # noqa: S603  (the linker that the user has, no shell)
            command, capture_output=True, text=True, timeout=_LINK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotKeptError(f"{linker} does not end within {_LINK_S} s") from error
    if done.returncode:
        raise NotKeptError(f"{linker} cannot link {object_file}: {done.stderr.strip()}")
    return library


def facts_of(
    context: AttentionContext, capability: tuple[int, int], sources: Sequence[Path]
) -> dict[str, str]:
    """Return all that decides on what is compiled, as text.

    Args:
        context: of the engine.
        capability: the device's.
        sources: files and folders, of whose Python sources each byte counts.
    """
    multiprocessors = 0
    if context.device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(context.device).multi_processor_count
    shape = ("dtype", "num_q_heads", "num_kv_heads", "head_dim", "page_size")
    return {
        "format": _FORMAT,
        "machine": platform.machine(),
        "device": f"{capability[0]}.{capability[1]} of {multiprocessors}",
        **{name: str(getattr(context, name)) for name in shape},
        **{name: _version(name) for name in _DISTRIBUTIONS},
        **{
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.startswith(_OF_THE_CACHE)
        },
        "sources": _digest(sources),
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _digest(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            contents = path.read_bytes()
            name = str(path.relative_to(source)) if source.is_dir() else path.name
            digest.update(f"{name}\0{len(contents)}\0".encode() + contents)
    return digest.hexdigest()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _load(library: Path, runtimes: Sequence[Path]) -> Callable[..., Any]:
    try:
        import tvm_ffi

        for runtime in runtimes:
            # So FlashAttention 4 does it: a kernel's library names none that it needs.
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        kernel: Callable[..., Any] = tvm_ffi.load_module(str(library))[_FUNCTION]
    except Exception as error:
        raise NotKeptError(f"{library} cannot be loaded: {error}") from error
    return kernel
