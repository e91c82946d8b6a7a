"""A plugin's own sources: built once a version, for everybody, and never while serving."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from minisgl.errors import UnsupportedBackendError
from minisgl.kernel.jit import JitLoader, compile_extension

CPU = torch.device("cpu")
SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, NAME, NULL, -1, NULL};
PyMODINIT_FUNC INIT(void) {
    PyObject *made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "answer", ANSWER);
    return made;
}
"""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


class Compiler:
    """Builds with the C compiler and counts."""

    def __init__(self, *, works: bool = True) -> None:
        self.num_builds = 0
        self.works = works

    def __call__(
        self, module_name: str, sources: Sequence[Path], flags: Sequence[str], folder: Path
    ) -> Path:
        self.num_builds += 1
        if not self.works:
            raise RuntimeError("nvcc was not found")
        out = folder / f"{module_name}.so"
        defines = [f'-DNAME="{module_name}"', f"-DINIT=PyInit_{module_name}", *flags]
        include = sysconfig.get_path("include")
        files = [str(source) for source in sources]
        command = ["cc", "-shared", "-fPIC", f"-I{include}", *defines, *files, "-o", str(out)]
        subprocess.run(command, check=True)
        return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.c"
    path.write_text(SOURCE)
    return path


@needs_compiler
def test_a_module_is_built_once_and_kept_for_the_next_process(tmp_path: Path, source: Path) -> None:
    compiler = Compiler()
    for _ in range(2):
        loader = JitLoader(CPU, tmp_path / "cache", compiler)
        for _ in range(2):
            assert loader.load("kernel", [source], ["-DANSWER=42"]).answer == 42
    assert compiler.num_builds == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


@needs_compiler
def test_other_sources_and_flags_are_other_modules(tmp_path: Path, source: Path) -> None:
    """Catches: yesterday's build of a source that has changed."""
    compiler = Compiler()
    loader = JitLoader(CPU, tmp_path / "cache", compiler)
    assert loader.load("kernel", [source], ["-DANSWER=1"]).answer == 1
    assert loader.load("kernel", [source], ["-DANSWER=2"]).answer == 2
    source.write_text(SOURCE.replace("ANSWER)", "ANSWER + 100)"))
    assert loader.load("kernel", [source], ["-DANSWER=2"]).answer == 102
    assert compiler.num_builds == 3


@needs_compiler
def test_a_sealed_loader_builds_nothing_but_has_what_was_built(
    tmp_path: Path, source: Path
) -> None:
    compiler = Compiler()
    loader = JitLoader(CPU, tmp_path / "cache", compiler)
    loader.load("kernel", [source], ["-DANSWER=1"])
    loader.seal()
    assert loader.load("kernel", [source], ["-DANSWER=1"]).answer == 1
    with pytest.raises(UnsupportedBackendError, match=r"a request would wait.*create\(\)"):
        loader.load("kernel", [source], ["-DANSWER=2"])
    assert compiler.num_builds == 1


def test_torch_s_builder_is_silent_and_may_flush_its_output(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Catches: output sent to nowhere, which the builder flushes before it runs the compiler."""

    def load(*, name: str, sources: Sequence[str], build_directory: str, **_: object) -> None:
        print("compiling")  # noqa: T201
        sys.stdout.flush()
        assert sources == [str(source)]
        (Path(build_directory) / f"{name}.so").touch()

    monkeypatch.setattr("torch.utils.cpp_extension.load", load)
    assert compile_extension("kernel", [source], [], tmp_path) == tmp_path / "kernel.so"
    assert (tmp_path / "kernel.so").exists()
    assert capsys.readouterr().out == ""


def test_a_compiler_that_fails_is_named_with_the_remedy(tmp_path: Path, source: Path) -> None:
    loader = JitLoader(CPU, tmp_path / "cache", Compiler(works=False))
    with pytest.raises(UnsupportedBackendError, match="nvcc was not found; it needs nvcc"):
        loader.load("kernel", [source])
    assert not list((tmp_path / "cache").iterdir()), "nothing half-built stays"
