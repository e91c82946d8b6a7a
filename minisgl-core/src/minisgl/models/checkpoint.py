"""Checkpoints on disk: their configuration, and their tensors as a stream.

Only formats that cannot run code are read: safetensors and GGUF. Code that a checkpoint brings
along (``auto_map``) is never executed.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from minisgl.errors import ModelLoadError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Checkpoint(ABC):
    """A model's configuration and weights.

    Attributes:
        path: the folder or file.
        hf_config: a transformers configuration.
        architectures: names in ``config.json``, such as ``LlamaForCausalLM``.
        eos_token_ids: all tokens that end a text.
    """

    path: Path
    hf_config: Any
    architectures: tuple[str, ...]
    eos_token_ids: tuple[int, ...]

    @property
    @abstractmethod
    def num_tensors(self) -> int:
        """How many tensors ``tensors`` yields."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Yield the name of every tensor, by Hugging Face's names, without reading any."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)``, one in memory at a time; may be called once more.

        Raises:
            ModelLoadError: a file is damaged; names it.
        """


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


def load_hf_config(path: Path) -> Any:
    """Read ``config.json`` of a folder, without running any code that comes with it.

    A ``model_type`` that transformers does not know gives a plain configuration with the file's
    values as attributes: the plugin that offers the architecture reads it.

    Raises:
        ModelLoadError: there is none, or it is no valid configuration.
    """
    file = path / "config.json"
    values = read_json(file)
    if values is None:
        raise ModelLoadError(
            f"{path} holds no config.json; name the folder of a Hugging Face checkpoint"
        )
    try:
        known = values.get("model_type") in _known_model_types()
        if not known:
            return PreTrainedConfig.from_dict(values)
        with configurations_alone():
            return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers' validation raises a type per field
        raise ModelLoadError(f"{file} is no valid configuration: {error}") from error


@contextmanager
def configurations_alone() -> Iterator[None]:
    """Let transformers import configuration classes without its models.

    Its decorator of docstrings looks up the name of each configuration's model. In 5.17 that
    imports text generation and all that this brings along: a thousand modules, seconds. In here
    those docstrings name the configuration class instead.
    """
    # Not by attribute: the package has a function of the module's name.
    module = sys.modules.get("transformers.utils.auto_docstring")
    places = getattr(module, "PLACEHOLDER_TO_AUTO_MODULE", {})
    models, configs = places.get("model_class"), places.get("config_class")
    if None in (models, configs) or models == configs:
        yield
        return
    places["model_class"] = configs
    try:
        yield
    finally:
        places["model_class"] = models


def architectures_of(hf_config: Any, path: Path) -> tuple[str, ...]:
    """Return the architecture names of a configuration.

    Raises:
        ModelLoadError: there are none.
    """
    architectures = getattr(hf_config, "architectures", None)
    if not architectures:
        raise ModelLoadError(
            f"{path / 'config.json'} names no architectures, so nobody knows which model to build; "
            'add "architectures": ["LlamaForCausalLM"], or whatever the model is'
        )
    return tuple(architectures)


def read_json(file: Path) -> dict[str, Any] | None:
    """Return a JSON object from a file, or ``None`` if there is no such file.

    Raises:
        ModelLoadError: the file is not a JSON object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file} is not a JSON object but a {type(values).__name__}")
    return values


def as_ids(value: Any) -> tuple[int, ...]:
    """Return token ids given as one id, a list of them, or ``None``."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def _known_model_types() -> frozenset[str]:
    from transformers import CONFIG_MAPPING

    return frozenset(CONFIG_MAPPING.keys())


def _eos_token_ids(path: Path, hf_config: Any) -> tuple[int, ...]:
    """Return what ends a text; as in transformers, ``generation_config.json`` comes first."""
    generation = read_json(path / "generation_config.json") or {}
    ids = as_ids(generation.get("eos_token_id"))
    return ids or as_ids(getattr(hf_config, "eos_token_id", None))


def _find_gguf(path: Path) -> Path | None:
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


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
