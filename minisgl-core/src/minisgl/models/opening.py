"""Opens a checkpoint in whichever of the formats it is."""

from pathlib import Path

from minisgl.errors import ModelLoadError
from minisgl.models.checkpoint import Checkpoint
from minisgl.models.safetensors import SafetensorsCheckpoint


def open_checkpoint(path: Path, load_format: str) -> Checkpoint:
    """Open a checkpoint: its configuration is read, its weights are not yet.

    Args:
        path: a folder with ``config.json``, or a ``.gguf`` file (or a folder with just one).
        load_format: ``auto``, ``safetensors``, ``gguf``, or ``dummy`` for no weights at all.

    Raises:
        ModelLoadError: nothing there can be loaded, or a file is damaged.
    """
    gguf_file = _find_gguf(path)
    if load_format == "gguf" and gguf_file is None:
        raise ModelLoadError(
            f"load_format='gguf', but {path} is no .gguf file and holds not exactly one; name the "
            "file itself, or use load_format='auto'"
        )
    if gguf_file is not None and load_format != "safetensors":
        from minisgl.models.gguf import GGUFCheckpoint

        return GGUFCheckpoint(gguf_file, with_weights=load_format != "dummy")
    if not path.is_dir():
        raise ModelLoadError(
            f"{str(path)!r} is not a folder with a checkpoint; allowed: a folder with config.json "
            "and *.safetensors, or a .gguf file"
        )
    return SafetensorsCheckpoint(path, with_weights=load_format != "dummy")


def _find_gguf(path: Path) -> Path | None:
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None
