"""What a checkpoint is: its configuration, and its tensors as a stream.

Only formats that cannot run code are read: ``safetensors.py`` and ``gguf.py``. Code that a
checkpoint brings along (``auto_map``) is never executed.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from minisgl.errors import ModelLoadError


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
