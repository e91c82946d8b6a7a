"""The first start and later ones: what is imported, kept, loaded and said."""

import importlib.machinery
import logging
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_fa import create, kept
from minisgl_attn_fa.fa4 import DirectKernels, FlashAttention4
from minisgl_attn_fa.samples import largest_error, samples
from support import fake_flash_attn as fakes
from support.kernel_objects import KernelObjects, needs_compiler

pytestmark = needs_compiler

CAPABILITY = (9, 0)
SLOW, NEXT_SLOW = "which takes seconds of the start: ", "at the next start too"


class Starts:
    """Starts of one engine, each as in a process of its own."""

    def __init__(self, monkeypatch, caplog, objects: KernelObjects, tmp_path: Path) -> None:
        rows = PagedRows([40], page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8)
        self.context = replace(rows.context, max_running_requests=300)
        self.kept = tmp_path / "minisgl" / "kernels" / "flash-attention-4" / "linked"
        self.objects = objects
        self.exported = objects.right
        self.fault = 0.0
        self._exports = tmp_path / "exports"
        self._patch = monkeypatch
        self._caplog = caplog

    def start(self, *, imports: bool, capability: tuple[int, int] = CAPABILITY) -> tuple[str, str]:
        """Return how it got its kernels, which compute what they should, and what was logged.

        Args:
            imports: FlashAttention 4 can be imported; otherwise trying to is an error.
            capability: of the device.
        """
        cache = fakes.FakeCache(self._exports, self.exported) if imports else None
        interface = fakes.FakeInterface(self.fault, cache)
        with self._patch.context() as patch, self._caplog.at_level(logging.INFO):
            self._caplog.clear()
            if imports:
                self._install(patch, interface)
            kernel, how = create.kernel_of("fa4", self.context, capability)
            self.kernel = kernel
            for sample in samples(self.context):
                assert largest_error(kernel, sample) < 1e-6
        assert bool(interface.compiled) is imports
        return how, self._caplog.text

    def _install(self, patch: pytest.MonkeyPatch, interface: fakes.FakeInterface) -> None:
        package = ModuleType("flash_attn")
        package.__spec__ = importlib.machinery.PathFinder.find_spec("flash_attn")
        cute, runtime = ModuleType("flash_attn.cute"), ModuleType("cutlass.cute.runtime")
        cute.interface = interface
        runtime.find_runtime_libraries = lambda *, enable_tvm_ffi: [str(self.objects.runtime)]
        added = {
            "flash_attn": package,
            "flash_attn.cute": cute,
            "cutlass": ModuleType("cutlass"),
            "cutlass.cute": ModuleType("cutlass.cute"),
            "cutlass.cute.runtime": runtime,
        }
        for name, module in added.items():
            patch.setitem(sys.modules, name, module)


@pytest.fixture
def starts(monkeypatch, caplog, kernel_objects, tmp_path, flash_attn_site) -> Starts:
    flash_attn_site.fa4()
    # It stands for the real one, which the site's other packages do not need.
    shutil.rmtree(flash_attn_site.root / "tvm_ffi")
    return Starts(monkeypatch, caplog, kernel_objects, tmp_path)


def test_the_second_start_imports_neither_flash_attention_nor_a_compiler(starts):
    how, said = starts.start(imports=True)
    assert how == "loaded, and its kernels compiled for prefill and decode"
    assert SLOW + "no kernels are kept for these versions" in said
    assert not [r for r in starts._caplog.records if r.levelno > logging.INFO], "nobody's fault"
    assert isinstance(starts.kernel, FlashAttention4)
    how, said = starts.start(imports=False)
    assert (how, said) == ("kept kernels loaded and compared", "")
    assert isinstance(starts.kernel, DirectKernels)


def test_each_window_has_kernels_of_its_own(starts):
    starts.start(imports=True)
    starts.context = replace(starts.context, sliding_window=True)
    with pytest.raises(AssertionError, match="must not import FlashAttention"):
        starts.start(imports=False)
    starts.start(imports=True)
    assert starts.start(imports=False)[1] == ""
    names = {file.name.rsplit("-", 1)[0] for file in starts.kept.glob("*.json")}
    assert names == {"decode", "prefill", "decode-window", "prefill-window"}


def test_a_damaged_library_is_compiled_again_and_that_is_a_warning(starts):
    starts.start(imports=True)
    for library in starts.kept.glob("*.so"):
        damaged = library.read_bytes()[:-100]
        library.unlink()  # this process still has it
        library.write_bytes(damaged)
    _, said = starts.start(imports=True)
    assert said.count("WARNING") == 1
    assert "is damaged" in said
    assert starts.start(imports=False)[1] == ""


def test_a_kernel_that_computes_something_else_is_not_used(starts):
    starts.exported = starts.objects.wrong
    how, said = starts.start(imports=True)
    assert how.startswith("loaded")
    assert NEXT_SLOW in said, "it is tried as the next start will"
    how, said = starts.start(imports=True)
    assert how.startswith("loaded")
    assert SLOW + "a kept kernel computes something else, by " in said


def test_a_kernel_that_fails_is_not_used(starts, monkeypatch):
    starts.start(imports=True)
    monkeypatch.setattr(create, "DirectKernels", lambda _kernels: None)
    monkeypatch.setattr(create, "largest_error", failing)
    _, said = starts.start(imports=True)
    assert SLOW + "a kept kernel fails: no such device" in said


def failing(*_given):
    raise RuntimeError("no such device")


@pytest.mark.parametrize("changed", ["version", "variable", "sources", "shape"])
def test_whatever_else_is_compiled_is_not_taken_for_it(
    starts, changed, monkeypatch, flash_attn_site
):
    starts.start(imports=True)
    if changed == "version":
        monkeypatch.setattr(kept, "version", lambda _distribution: "1.0")
    elif changed == "variable":
        monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    elif changed == "sources":
        (flash_attn_site.root / "flash_attn" / "cute" / "more.py").write_text("")
    else:
        starts.context = replace(starts.context, num_q_heads=8)
    _, said = starts.start(imports=True)
    assert SLOW + "no kernels are kept for these versions" in said


def test_without_a_linker_the_first_start_says_that_the_next_is_slow_too(starts, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    _, said = starts.start(imports=True)
    assert NEXT_SLOW in said
    assert "linking its kernels takes one of cc, gcc, clang, ld on the PATH" in said


def test_a_kernel_that_cannot_be_called_directly_is_not_kept(starts):
    starts.fault = 1e-3
    _, said = starts.start(imports=True)
    assert "called through its own function for decode" in said
    assert "keeps no kernel for decode" in said
    assert not starts.kept.exists()


def test_nothing_is_kept_where_it_is_switched_off(starts, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert starts.start(imports=True)[1] == ""
    assert not starts.kept.exists()


def test_a_folder_that_cannot_be_written_is_one_warning_and_no_failure(starts):
    folder = starts.kept.parent
    folder.parent.mkdir(parents=True)
    folder.write_text("not a folder")
    _, said = starts.start(imports=True)
    assert said.count("WARNING") == 1
    assert "FlashAttention 4 compiles at every start: " in said


def test_kernels_are_loaded_from_a_folder_that_cannot_be_written(starts, monkeypatch):
    starts.start(imports=True)

    def refuse(*_given, **_named):
        raise OSError("read-only file system")

    for name in ("mkdir", "write_text", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert starts.start(imports=False)[1] == ""


def test_it_is_kept_where_flash_attention_keeps_its_own(starts, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "elsewhere"))
    starts.start(imports=True)
    assert not starts.kept.exists()
    assert [*(tmp_path / "elsewhere" / "linked").glob("*.so")]
    assert starts.start(imports=False)[1] == ""


def test_devices_that_were_not_looked_up_import_it_at_every_start(starts):
    for _ in range(2):
        how, said = starts.start(imports=True, capability=(10, 0))
        assert how.startswith("loaded")
        assert said == ""
    assert not starts.kept.exists()
