"""A GGUF file's header and tensors.

The header is read here: the ``gguf`` package takes seconds for a vocabulary. Its tables of types
and its dequantization are used as they are. Layout of the format, version 2 and 3, little-endian:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minisgl.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
"""Value types of the header, as ``struct`` codes."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_PIECE = 2**16
"""Weights that are dequantized at once: so many fit into a core's cache."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies; ``shape`` has the slowest dimension first, ``offset`` is in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """An open GGUF file; its tensors stay on disk until they are dequantized.

    Raises:
        ModelLoadError: the file is damaged, no GGUF file, or one of several parts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._values, self._tensors = _Header(self._data).read()
        except (OSError, ValueError, struct.error) as error:
            raise ModelLoadError(
                f"{path} is damaged, incomplete or no GGUF file ({error}); fetch it again"
            ) from error
        parts = self.value("split.count", 1)
        if parts > 1:
            raise ModelLoadError(
                f"{path} is one of {parts} parts of a GGUF file; merge them first: "
                "llama-gguf-split --merge FIRST_PART OUTPUT"
            )

    def value(self, key: str, default: Any = None) -> Any:
        """Return a header value as Python's own type, or ``default``."""
        return self._values.get(key, default)

    def require(self, key: str) -> Any:
        """Return a header value.

        Raises:
            ModelLoadError: the header lacks it.
        """
        if key not in self._values:
            raise ModelLoadError(f"the header of {self.path} lacks {key!r}")
        return self._values[key]

    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of all tensors, by llama.cpp's names, in the file's order."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, slowest dimension first.

        Raises:
            ModelLoadError: there is no such tensor.
        """
        if name not in self._tensors:
            raise ModelLoadError(f"{self.path} holds no tensor {name!r}")
        return self._tensors[name].shape

    def types(self) -> frozenset[str]:
        """Return the names of all tensors' types, such as ``Q4_1``."""
        gguf = _import_gguf()
        return frozenset(
            gguf.GGMLQuantizationType(tensor.kind).name for tensor in self._tensors.values()
        )

    def check_data(self) -> None:
        """Check that the file is long enough for every tensor.

        Raises:
            ModelLoadError: it is not, or a tensor's type is unknown.
        """
        for name in self._tensors:
            self._raw(name)

    def tensor(self, name: str) -> "torch.Tensor":
        """Return a tensor, dequantized to float32."""
        return self._dequantize(name, self._raw(name), self.shape(name))

    def slices(self, name: str) -> "Iterator[torch.Tensor]":
        """Yield a tensor's slices along its first dimension, dequantized one by one."""
        for part in self._raw(name):
            yield self._dequantize(name, part, self.shape(name)[1:])

    def _raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the stored bytes as ``[..., bytes a row]``."""
        gguf, tensor = _import_gguf(), self._tensors[name]
        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
        except ValueError as error:
            raise ModelLoadError(
                f"{name} in {self.path} has the type number {tensor.kind}, which the gguf "
                "package does not know: pip install -U gguf"
            ) from error
        *outer, row = tensor.shape
        if row % block:
            raise ModelLoadError(
                f"{name} in {self.path} has rows of {row} weights, but its type stores {block} at "
                "a time; fetch the file again"
            )
        stored = (*outer, row // block * block_bytes)
        size = int(np.prod(stored, dtype=np.int64))
        if tensor.offset + size > len(self._data):
            raise ModelLoadError(
                f"{self.path} is incomplete: {name} ends at byte {tensor.offset + size}, but the "
                f"file has {len(self._data)}; fetch it again"
            )
        data = np.frombuffer(self._data, dtype=np.uint8, count=size, offset=tensor.offset)
        return data.reshape(stored)

    def _dequantize(
        self, name: str, data: npt.NDArray[np.uint8], shape: tuple[int, ...]
    ) -> "torch.Tensor":
        import torch  # a tokenizer process reads the header alone, and does without

        gguf = _import_gguf()
        kind = gguf.GGMLQuantizationType(self._tensors[name].kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        values, stored = np.empty(math.prod(shape), dtype=np.float32), data.reshape(-1)
        # Of what it gets gguf takes 16 rows at a time, which is slow, but one row as a whole.
        step = _PIECE // block
        try:
            for first in range(0, len(values) // block, step):
                piece = stored[first * block_bytes : (first + step) * block_bytes]
                values[first * block : (first + step) * block] = gguf.dequantize(piece, kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{name} in {self.path} has the type {kind.name}, which the gguf package cannot "
                "dequantize; use a file of another type, such as Q8_0 or Q4_K_M"
            ) from error
        return torch.from_numpy(values).reshape(shape)


class _Header:
    """Reads a header from its bytes, in order; running off the end raises ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        """Return the values and the tensors."""
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not start with 'GGUF'")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format, little-endian 2 or 3 is supported")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            values[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        tensors = {
            name: _Tensor(shape, kind, start + offset) for name, shape, kind, offset in infos
        }
        return values, tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._scalar("I"), self._scalar("Q")
            if inner in _SCALARS:
                return list(self._unpack(f"<{count}{_SCALARS[inner]}"))
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} in the header")
        return self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        return self._unpack(f"<{code}")[0]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        end = self._at + 8 + length
        if end > len(self._data):
            raise ValueError("a text in the header runs beyond the end of the file")
        text = self._data[self._at + 8 : end].decode("utf-8")
        self._at = end
        return text


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ModelLoadError(
            "reading the weights of GGUF files needs the gguf package: "
            "pip install 'minisgl-core[gguf]'"
        ) from error
    return gguf
