"""``Layer``: declared weights, and where each part of a checkpoint goes into them.

A layer allocates its tensors when it is built and declares, piece by piece, which part of which
checkpoint tensor fills which part of each. That one declaration serves loading, checking that
each parameter is filled exactly once, and gathering the shards of all ranks back together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from minisgl.errors import SettingsError
from minisgl.layers.context import BuildContext
from minisgl.moe.fp8 import FP8, quantize_rows

Index = tuple[int | slice, ...]
Dummy = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor's part in a weight of this rank.

    Attributes:
        name: of the tensor in the checkpoint.
        shape: of the whole tensor in the checkpoint.
        source: the part of it that this rank takes.
        target: the part of the weight that it fills; an empty one, if the tensor must be there and
            nothing of it is this rank's.
    """

    name: str
    shape: tuple[int, ...]
    source: Index
    target: Index


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a layer and the pieces that fill it.

    Attributes:
        tensor: what the layer computes with.
        pieces: of which each fills its part of ``tensor`` alone.
        dummy: how random weights start.
        dtype: of random weights, as a checkpoint would have them.
        scale: float32 ``[...]`` for a ``tensor`` ``[..., n]`` in fp8; see ``quantize_rows``.
    """

    tensor: torch.Tensor
    pieces: tuple[Piece, ...]
    dummy: Dummy
    dtype: torch.dtype
    scale: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device, scales included."""
        return self.tensor.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def fill(self, piece: Piece, whole: torch.Tensor) -> None:
        """Copy a piece's part of ``whole``, its checkpoint tensor, to where it belongs.

        A row that is quantized has the scale of the whole row in the checkpoint, so that every
        number of ranks makes the same weights.
        """
        if self.scale is None:
            self.tensor[piece.target].copy_(whole[piece.source])
            return
        taken = whole[piece.source]
        if not taken.numel():
            return
        last = whole.ndim - 1
        rows, columns = whole[piece.source[:last]], (..., *piece.source[last:])
        tensor, scale = self.tensor[piece.target], self.scale[piece.target[: self.scale.ndim]]
        # A stack is quantized expert by expert: in float32 it would take much more room than now.
        parts = zip(tensor, scale, rows, strict=True) if rows.ndim > 2 else [(tensor, scale, rows)]
        for to, of, part in parts:
            quantized, part_scale = quantize_rows(part.to(tensor.device))
            to.copy_(quantized[columns])
            of.copy_(part_scale)


class Layer:
    """A part of a model: tensors declared with ``declare``, layers in attributes, ``forward``.

    Subclasses call ``super().__init__()`` first. There is no registration magic: ``layers`` walks
    the attributes (and lists of layers) in the order in which they were set.
    """

    def __init__(self) -> None:
        self._weights: dict[str, Weight] = {}

    def declare(
        self,
        name: str,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        context: BuildContext,
        *,
        dummy: Dummy = "normal",
        matrix: bool = False,
    ) -> torch.Tensor:
        """Allocate a weight of ``shape`` in the context's dtype and remember its pieces.

        What no piece covers (the padding of odd sizes under tensor parallelism) stays zero. With
        ``matrix`` the weight is the right side of products, ``[..., out, in]``: then its strides,
        never its shape, follow what is fastest on the device.
        """
        covered = sum(_numel(piece.target, shape) for piece in pieces)
        tensor = allocate(shape, context.dtype, context.device, matrix=matrix)
        if covered != tensor.numel():
            tensor.zero_()
        self.adopt(name, tensor, pieces, dummy=dummy)
        return tensor

    def declare_quantized(
        self, name: str, shape: Sequence[int], pieces: Sequence[Piece], context: BuildContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate a weight ``[..., n]`` in fp8, and scales ``[...]``; as ``declare`` otherwise.

        It is quantized as it is filled, one checkpoint tensor after the other. What no piece covers
        is zero, with a scale of one.
        """
        tensor = torch.zeros(tuple(shape), dtype=torch.uint8, device=context.device).view(FP8)
        scale = torch.ones(tuple(shape[:-1]), dtype=torch.float32, device=context.device)
        self._weights[name] = Weight(tensor, tuple(pieces), "normal", context.dtype, scale)
        return tensor, scale

    def adopt(
        self, name: str, tensor: torch.Tensor, pieces: Sequence[Piece], *, dummy: Dummy = "normal"
    ) -> None:
        """Declare a tensor that exists already."""
        self._weights[name] = Weight(tensor, tuple(pieces), dummy, tensor.dtype)

    def replace_pieces(self, name: str, pieces: Sequence[Piece]) -> None:
        """Let other pieces fill a weight that is declared."""
        self._weights[name] = replace(self._weights[name], pieces=tuple(pieces))

    def layers(self) -> Iterator["Layer"]:
        """Yield this layer and, depth first, all layers in it; a shared one only once."""
        seen: set[int] = set()
        stack: list[Layer] = [self]
        while stack:
            layer = stack.pop()
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            yield layer
            stack.extend(reversed(list(_children(layer))))

    def weights(self) -> Iterator[Weight]:
        """Yield every declared weight of this layer and the layers in it."""
        for layer in self.layers():
            yield from layer._weights.values()  # noqa: SLF001  (a Layer's own attribute)

    def prepare_loading(self, names: frozenset[str]) -> None:
        """Adapt the declarations to a checkpoint that holds ``names``; called once, before."""

    def finish_loading(self) -> None:
        """Derive what depends on loaded weights; called once, after all are filled."""

    def ignores(self, name: str) -> bool:  # noqa: ARG002
        """Whether a checkpoint tensor of this name that fills nothing is no mistake."""
        return False


def allocate(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, matrix: bool = False
) -> torch.Tensor:
    """Return an uninitialised tensor; for ``matrix`` see ``Layer.declare``."""
    # One-token products with tall matrices read them twice as fast by columns (MKL's sgemv,
    # SmolLM2's shapes: 20 against 10 GB/s); with many tokens the layouts are equal.
    if matrix and device.type == "cpu" and shape[-2] > shape[-1]:
        stored = (*shape[:-2], shape[-1], shape[-2])
        return torch.empty(stored, dtype=dtype, device=device).transpose(-1, -2)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def shard_range(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return ``[start, stop)`` of ``total`` for ``rank`` of ``size``, the last ranks shorter.

    Each rank stores ``shard_size(total, size)``, padded with zeros at its end.
    """
    local = shard_size(total, size)
    return min(rank * local, total), min((rank + 1) * local, total)


def shard_size(total: int, size: int) -> int:
    """Return how many elements each of ``size`` ranks stores of ``total``, padding included."""
    return -(-total // size)


def shard_heads(num_q_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """Return the q heads and the KV heads of ``rank``.

    With more ranks than KV heads each KV head is replicated on ``size / num_kv_heads`` ranks.

    Raises:
        SettingsError: the heads cannot be shared out evenly.
    """
    allowed = [n for n in range(1, num_q_heads + 1) if _divides_heads(num_q_heads, num_kv_heads, n)]
    if size not in allowed:
        raise SettingsError(
            f"parallel.tensor_parallel_size={size!r} does not divide this model's {num_q_heads} "
            f"attention heads and {num_kv_heads} KV heads; use one of {allowed}"
        )
    q_local = num_q_heads // size
    kv_local = max(num_kv_heads // size, 1)
    kv_start = rank * num_kv_heads // size
    return range(rank * q_local, (rank + 1) * q_local), range(kv_start, kv_start + kv_local)


def _divides_heads(num_q_heads: int, num_kv_heads: int, size: int) -> bool:
    if num_q_heads % size:
        return False
    return num_kv_heads % size == 0 or size % num_kv_heads == 0


def _children(layer: Layer) -> Iterator[Layer]:
    for value in vars(layer).values():
        yield from _layers_of(value)


def _layers_of(value: Any) -> Iterator[Layer]:
    if isinstance(value, Layer):
        yield value
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, Layer))


def _numel(target: Index, shape: Sequence[int]) -> int:
    count = 1
    for axis, length in enumerate(shape):
        index = target[axis] if axis < len(target) else slice(None)
        count *= 1 if isinstance(index, int) else len(range(*index.indices(length)))
    return count
