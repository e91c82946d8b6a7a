"""Compiles a plugin's own CUDA or C++ sources: once a version and device, and never while serving.

A module is built when an engine starts and kept in a cache folder. What decides whether it has to
be built again is in its key: the sources themselves, the flags, the versions of torch and CUDA, and
the device. Once the engine is ready its loader is sealed: no request ever waits for a compiler.
"""

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from minisgl.errors import UnsupportedBackendError

logger = logging.getLogger(__name__)

Compile = Callable[[str, Sequence[Path], Sequence[str], Path], Path]
"""Builds a Python extension: its name, sources, flags of nvcc and an empty folder to its file."""


class JitLoader:
    """What backends get to load their own kernels with, as ``context.jit``.

    Example::

        kernels = context.jit.load("my_decode", [Path(__file__).parent / "decode.cu"])
        kernels.decode(q, out)

    Args:
        device: for which code is built; the CPU if not given.
        folder: where modules are kept; by default ``minisgl/kernels`` in the user's cache folder.
        compile_module: builds one; by default torch's own extension builder, which needs nvcc for
            CUDA sources, a C++ compiler and ninja.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        folder: Path | None = None,
        compile_module: Compile | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._folder = folder or cache_folder()
        self._compile = compile_module or compile_extension
        self._loaded: dict[str, ModuleType] = {}
        self._sealed = False

    def load(self, name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> ModuleType:
        """Return the extension of ``sources``, built if no build of the same key is at hand.

        Args:
            name: of the Python module that the sources define (``TORCH_EXTENSION_NAME``).
            sources: files; all that they include must be among them or come with torch and CUDA.
            flags: of nvcc.

        Raises:
            UnsupportedBackendError: the compiler is missing or fails; or the module is not there
                and the engine serves already.
        """
        key = self._key(name, sources, flags)
        module_name = f"{name}_{key}"
        if module_name in self._loaded:
            return self._loaded[module_name]
        path = self._folder / f"{module_name}.so"
        if not path.exists():
            if self._sealed:
                raise UnsupportedBackendError(
                    f"kernel module {name!r} is asked for while the engine serves, and a request "
                    "would wait for its compiler; load it in the backend's create()"
                )
            self._build(module_name, sources, flags, path)
        module = self._loaded[module_name] = _import(module_name, path)
        return module

    def seal(self) -> None:
        """Build nothing from now on."""
        self._sealed = True

    def _build(
        self, module_name: str, sources: Sequence[Path], flags: Sequence[str], path: Path
    ) -> None:
        logger.info("compiling %s, once for this version and device", module_name)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            try:
                built = self._compile(module_name, sources, flags, Path(scratch))
            except Exception as error:
                raise UnsupportedBackendError(
                    f"kernel module {module_name!r} cannot be compiled: {error}; it needs nvcc of "
                    f"CUDA {torch.version.cuda}, a C++ compiler and ninja on the PATH"
                ) from error
            # Renamed at the end: another process sees all of it or nothing.
            shutil.move(built, path.with_suffix(f".{os.getpid()}"))
            path.with_suffix(f".{os.getpid()}").replace(path)

    def _key(self, name: str, sources: Sequence[Path], flags: Sequence[str]) -> str:
        digest = hashlib.sha256()
        facts = [name, *flags, torch.__version__, str(torch.version.cuda), self._device.type]
        if self._device.type == "cuda":
            facts.append(str(torch.cuda.get_device_capability(self._device)))
        for fact in facts:
            digest.update(fact.encode() + b"\0")
        for source in sources:
            digest.update(source.read_bytes() + b"\0")
        return digest.hexdigest()[:16]


def compile_extension(
    module_name: str, sources: Sequence[Path], flags: Sequence[str], folder: Path
) -> Path:
    """Build with torch's extension builder, for the device at hand; returns the built file."""
    from torch.utils import cpp_extension

    # What the builder prints is no part of this program's output; its errors hold the compiler's.
    with contextlib.redirect_stdout(io.StringIO()):
        cpp_extension.load(
            name=module_name,
            sources=[str(source) for source in sources],
            extra_cuda_cflags=["-O3", *flags],
            build_directory=str(folder),
            is_python_module=False,
        )
    return folder / f"{module_name}.so"


def _import(module_name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cache_folder() -> Path:
    """Return where compiled kernels are kept: ``minisgl/kernels`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "minisgl" / "kernels"
