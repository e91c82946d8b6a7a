"""Folders with safetensors files as checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minisgl.errors import ModelLoadError
from minisgl.models.checkpoint import (
    Checkpoint,
    architectures_of,
    as_ids,
    load_hf_config,
    read_json,
)

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsCheckpoint(Checkpoint):
    """A folder with ``config.json`` and safetensors files, which dummy weights do not need."""

    def __init__(self, path: Path, *, with_weights: bool = True) -> None:
        self.path = path
        self.hf_config = load_hf_config(path)
        self.architectures = architectures_of(self.hf_config, path)
        self.eos_token_ids = _eos_token_ids(path, self.hf_config)
        files = _find_safetensors(path) if with_weights else ()
        self._names = [(file, _names_in(file)) for file in files]
        quantization = getattr(self.hf_config, "quantization_config", None)
        if with_weights and quantization:
            method = dict(quantization).get("quant_method")
            raise ModelLoadError(
                f"{path} is quantized (quant_method={method!r}), which is not supported for "
                "safetensors; use the original checkpoint (moe.weights_dtype='fp8' halves what its "
                "experts take), or a GGUF file"
            )

    @property
    def num_tensors(self) -> int:
        """See the base class."""
        return sum(len(names) for _, names in self._names)

    def names(self) -> Iterator[str]:
        """See the base class; a name that two files hold comes twice."""
        for _, names in self._names:
            yield from names

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See the base class. Tensors are views of the mapped file, read as they are used."""
        for file, names in self._names:
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    yield name, opened.get_tensor(name)


def _eos_token_ids(path: Path, hf_config: Any) -> tuple[int, ...]:
    """Return what ends a text; as in transformers, ``generation_config.json`` comes first."""
    generation = read_json(path / "generation_config.json") or {}
    ids = as_ids(generation.get("eos_token_id"))
    return ids or as_ids(getattr(hf_config, "eos_token_id", None))


def _find_safetensors(path: Path) -> tuple[Path, ...]:
    """Return the files to read: those of the index, or the single file, or all there are."""
    index_file = path / "model.safetensors.index.json"
    index = read_json(index_file)
    if index is not None:
        files = [path / name for name in _shards(index_file, index)]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ModelLoadError(f"{index_file} names files that are not there: {missing}")
        return tuple(files)
    single = path / "model.safetensors"
    if single.exists():
        return (single,)
    files = [
        file
        for file in sorted(path.glob("*.safetensors"))
        # The publisher's own names, beside the Hugging Face form of the same weights.
        if not file.name.startswith("consolidated")
    ]
    if files:
        return tuple(files)
    if any(True for pattern in _PICKLES for _ in path.glob(pattern)):
        raise ModelLoadError(
            f"{path} holds only pickled weights (.bin, .pt), which can run code when read; convert "
            "them to safetensors: load the model with transformers and call save_pretrained"
        )
    raise ModelLoadError(
        f"{path} holds no weights; expected model.safetensors, or "
        "model.safetensors.index.json and its shards (load_format='dummy' needs none)"
    )


def _shards(index_file: Path, index: Any) -> list[str]:
    """Return the names of an index's files; they lie beside it, and nowhere else."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    names: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name:
            raise ModelLoadError(
                f"{index_file} must have a 'weight_map' of names of files beside it, "
                f"got {name!r}; fetch it again"
            )
    return sorted(set(names))


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file} is damaged or incomplete ({error}); fetch it again"
        ) from error
