"""Kernels on the disk: what is loaded, and what never is."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_fa import kept as module
from minisgl_attn_fa.fa4 import DirectKernels
from minisgl_attn_fa.kept import KeptKernels, NotKeptError, facts_of
from minisgl_attn_fa.samples import largest_error, samples
from support.kernel_objects import needs_compiler

pytestmark = needs_compiler

FACTS = {"format": "1", "dtype": "torch.float32"}
CONTEXT = PagedRows([40], page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8).context


@pytest.fixture
def kept(tmp_path, kernel_objects) -> KeptKernels:
    kept = KeptKernels(tmp_path / "linked", FACTS)
    kept.keep("decode", kernel_objects.right, [kernel_objects.runtime])
    return kept


def record_of(kept: KeptKernels) -> Path:
    (record,) = kept.folder.glob("*.json")
    return record


def change(record: Path, **values: object) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), **values}))


def refusal(kept: KeptKernels, name: str = "decode") -> tuple[str, int]:
    """Return why a kernel is not loaded, and how loudly that is said."""
    with pytest.raises(NotKeptError) as error:
        kept.load(name)
    return str(error.value), error.value.level


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def refuse(*_given):
        raise AssertionError("loaded")

    monkeypatch.setattr(module, "_load", refuse)


def error_of(kernel) -> float:
    kernels = DirectKernels({(True, False): kernel, (False, False): kernel})
    return max(largest_error(kernels, sample) for sample in samples(CONTEXT))


def test_what_is_kept_computes_what_it_did(kept):
    assert error_of(kept.load("decode")) < 1e-6
    assert len([*kept.folder.iterdir()]) == 2, "nothing is left of writing"
    assert kept.folder.stat().st_mode & 0o777 == 0o700, "nobody else leaves code there"


def test_nothing_kept_is_nobodys_fault(kept):
    text = "no kernels are kept for these versions, this device and this model's shape"
    assert refusal(kept, "prefill") == (text, logging.INFO)
    assert refusal(replace(kept, facts={**FACTS, "dtype": "bfloat16"})) == (text, logging.INFO)
    assert refusal(replace(kept, folder=Path("/nowhere"))) == (text, logging.INFO)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("spoil", [lambda old: old[:-1], lambda old: old + b"\0", lambda _: b""])
def test_a_truncated_or_foreign_library_is_never_loaded(kept, spoil):
    (library,) = kept.folder.glob("*.so")
    library.write_bytes(spoil(library.read_bytes()))
    reason, level = refusal(kept)
    assert reason == f"{library} is damaged: its checksum is another than was noted"
    assert level == logging.WARNING


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_library_that_is_gone_is_said(kept):
    (library,) = kept.folder.glob("*.so")
    library.unlink()
    assert "a kept kernel cannot be read" in refusal(kept)[0]


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"facts": 1, "library": 2}', "\udcff"])
def test_a_record_that_is_none_is_refused(kept, text):
    record_of(kept).write_bytes(text.encode(errors="surrogateescape"))
    reason, level = refusal(kept)
    assert "cannot be read as a record" in reason
    assert level == logging.WARNING


@pytest.mark.usefixtures("nothing_is_loaded")
def test_the_record_of_something_else_is_refused(kept):
    change(record_of(kept), facts={**FACTS, "torch": "1.0"})
    assert refusal(kept)[0].endswith("is the record of something else")


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_record_names_a_library_of_its_own_folder_only(kept, tmp_path):
    (library,) = kept.folder.glob("*.so")
    elsewhere = library.rename(tmp_path / library.name)
    change(record_of(kept), library=str(elsewhere))
    assert "cannot be read" in refusal(kept)[0]


@pytest.mark.usefixtures("nothing_is_loaded")
def test_another_runtime_library_is_refused(kept, tmp_path, kernel_objects):
    record = record_of(kept)
    change(record, runtimes={str(kernel_objects.runtime): 1})
    assert refusal(kept)[0].endswith("which a kept kernel needs, is not as it was")
    change(record, runtimes={str(tmp_path / "gone.so"): 1})
    assert refusal(kept)[0].endswith("which a kept kernel needs, is not as it was")


def test_what_tvm_ffi_cannot_load_is_said(kept, kernel_objects):
    kept.keep("lame", kernel_objects.lame, [kernel_objects.runtime])
    reason, level = refusal(kept, "lame")
    assert "cannot be loaded" in reason
    assert level == logging.WARNING


def test_the_last_one_that_was_kept_counts(kept, kernel_objects):
    """Two processes may keep at once: a record and its library belong together all the same."""
    kept.keep("decode", kernel_objects.wrong, [kernel_objects.runtime])
    assert error_of(kept.load("decode")) > 1e-3
    assert len([*kept.folder.glob("*.so")]) == 2
    kept.keep("decode", kernel_objects.right, [kernel_objects.runtime])
    assert error_of(kept.load("decode")) < 1e-6


def test_without_a_linker_nothing_is_kept(kept, kernel_objects, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotKeptError, match="takes one of cc, gcc, clang, ld on the PATH"):
        kept.keep("prefill", kernel_objects.right, [])


def test_what_cannot_be_linked_is_not_kept(kept, tmp_path):
    object_file = tmp_path / "truncated.o"
    object_file.write_bytes(b"no object")
    with pytest.raises(NotKeptError, match=r"cannot link .*truncated\.o"):
        kept.keep("prefill", object_file, [])
    assert len([*kept.folder.iterdir()]) == 2


def test_a_folder_that_cannot_be_made_is_said(tmp_path, kernel_objects):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotKeptError, match="cannot be kept"):
        KeptKernels(tmp_path / "file" / "linked", FACTS).keep("decode", kernel_objects.right, [])


# -- what decides on a kernel


@pytest.fixture
def sources(tmp_path) -> list[Path]:
    folder = tmp_path / "cute"
    (folder / "inner").mkdir(parents=True)
    (folder / "interface.py").write_text("1")
    (folder / "inner" / "tiles.py").write_text("2")
    (tmp_path / "fa4.py").write_text("3")
    return [folder, tmp_path / "fa4.py"]


@pytest.mark.parametrize(
    "changed",
    [{"page_size": 128}, {"head_dim": 64}, {"num_kv_heads": 1}, {"num_q_heads": 8}],
)
def test_another_shape_is_another_kernel(sources, changed):
    facts = facts_of(CONTEXT, (9, 0), sources)
    assert facts_of(replace(CONTEXT, **changed), (9, 0), sources) != facts


def test_another_device_version_or_variable_is_another_kernel(sources, monkeypatch):
    facts = facts_of(CONTEXT, (9, 0), sources)
    assert facts_of(CONTEXT, (9, 0), sources) == facts
    assert facts_of(CONTEXT, (10, 0), sources) != facts
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "/elsewhere")
    assert facts_of(CONTEXT, (9, 0), sources) == facts, "where it is kept is no part of it"
    for name in ("CUTE_DSL_ARCH", "FLASH_ATTENTION_ARCH", "FA_CLC"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert facts_of(CONTEXT, (9, 0), sources) != facts, name
    monkeypatch.setattr(module, "version", lambda _distribution: "1.0")
    assert facts_of(CONTEXT, (9, 0), sources) != facts


@pytest.mark.parametrize("name", ["cute/interface.py", "cute/inner/tiles.py", "fa4.py"])
def test_each_byte_of_the_sources_counts(sources, tmp_path, name):
    facts = facts_of(CONTEXT, (9, 0), sources)
    (tmp_path / name).write_text("4")
    assert facts_of(CONTEXT, (9, 0), sources) != facts
