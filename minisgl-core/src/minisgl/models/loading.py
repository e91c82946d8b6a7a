"""Fill a model's declared weights from a checkpoint: each exactly once, or say what is wrong."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection
from zlib import crc32

import torch

from minisgl.errors import ModelLoadError
from minisgl.layers.base import Layer, Piece, Weight
from minisgl.models.checkpoint import Checkpoint
from minisgl.models.progress import progress_bar

_MAX_LISTED = 8
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Tables that old checkpoints store and every loader computes anew."""

Places = dict[str, list[tuple[Weight, Piece]]]
"""By checkpoint name: the weights and their parts that it fills."""


def load_weights(model: Layer, checkpoint: Checkpoint, *, progress: bool) -> None:
    """Fill every weight of ``model`` from ``checkpoint``, one checkpoint tensor at a time.

    Names are compared before anything is read. Tensors are cast to the weights' dtype, or
    quantized.

    Raises:
        ModelLoadError: names are missing, unexpected or there twice, or a shape differs.
    """
    names = list(checkpoint.names())
    for layer in list(model.layers()):
        layer.prepare_loading(frozenset(names))
    places = _places(model)
    read = [name for name in names if name in places or not _ignored(model, name)]
    _check_names(places, read, checkpoint)
    with progress_bar(
        total=checkpoint.num_tensors, desc="Loading weights", unit="tensor", show=progress
    ) as bar:
        for name, tensor in checkpoint.tensors():
            for weight, piece in places.get(name, ()):
                _check_shape(name, tensor, piece, checkpoint)
                weight.fill(piece, tensor)
            bar.update()
    for layer in list(model.layers()):
        layer.finish_loading()


def fill_dummy(model: Layer, seed: int) -> None:
    """Fill every weight with random values: norms with ones, biases with zeros.

    For measurements. Whole checkpoint tensors are drawn, each by its name, and sharded like loaded
    ones: every number of ranks makes the same model.
    """
    for weight in model.weights():
        for piece in weight.pieces:
            part = weight.tensor[piece.target]
            if not part.numel():
                continue
            if weight.dummy == "normal":
                weight.fill(piece, _draw(piece, weight, seed))
            else:
                part.fill_(1 if weight.dummy == "ones" else 0)


def _draw(piece: Piece, weight: Weight, seed: int) -> torch.Tensor:
    """Return a random checkpoint tensor, on the device of a weight."""
    device = weight.tensor.device
    generator = torch.Generator(device).manual_seed(seed ^ crc32(piece.name.encode()))
    whole = torch.empty(piece.shape, dtype=weight.dtype, device=device)
    return whole.normal_(std=0.02, generator=generator)


def _places(model: Layer) -> Places:
    places: Places = defaultdict(list)
    for weight in model.weights():
        for piece in weight.pieces:
            places[piece.name].append((weight, piece))
    return dict(places)


def _ignored(model: Layer, name: str) -> bool:
    return bool(_IGNORED.search(name)) or any(layer.ignores(name) for layer in model.layers())


def _check_names(places: Places, names: list[str], checkpoint: Checkpoint) -> None:
    missing = sorted(places.keys() - set(names))
    unexpected = sorted(set(names) - places.keys())
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    problems = [
        f"{what}: {_some(found)}"
        for what, found in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("in several files", repeated),
        )
        if found
    ]
    if problems:
        raise ModelLoadError(
            f"{checkpoint.path} does not fit the architecture "
            f"{', '.join(checkpoint.architectures)}: {'; '.join(problems)}"
        )


def _check_shape(name: str, tensor: torch.Tensor, piece: Piece, checkpoint: Checkpoint) -> None:
    if tuple(tensor.shape) != piece.shape:
        raise ModelLoadError(
            f"{name} in {checkpoint.path} has shape {list(tensor.shape)}, but the model's "
            f"configuration asks for {list(piece.shape)}"
        )


def _some(names: Collection[str]) -> str:
    listed = ", ".join(list(names)[:_MAX_LISTED])
    more = len(names) - _MAX_LISTED
    return f"{len(names)} tensors ({listed}{f' and {more} more' if more > 0 else ''})"
