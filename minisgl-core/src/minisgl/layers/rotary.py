"""Rotary position embeddings (Su et al., 2021) and the ways in which models stretch them.

Each kind is a function from a ``RopeConfig`` to inverse frequencies and the factor on cosines
and sines, equal to transformers' initialiser of that name.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from minisgl.errors import ModelLoadError, nearest
from minisgl.kernel.rotation import Rotation
from minisgl.layers.base import Layer
from minisgl.layers.context import BuildContext
from minisgl.layers.rope_config import RopeConfig

Frequencies = tuple[torch.Tensor, float]


class RotaryEmbedding(Layer):
    """The table of cosines and sines of every position below ``context.max_seq_len``.

    Raises:
        ModelLoadError: the kind is unknown or lacks a parameter.
    """

    def __init__(self, rope: RopeConfig, context: BuildContext) -> None:
        super().__init__()
        inverse, factor = inverse_frequencies(rope, context.max_seq_len)
        positions = torch.arange(context.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions, inverse)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
        self.cos_sin = table.to(context.device)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of a launch's tokens, for the op ``rope`` of every layer."""
        return Rotation(positions, self.cos_sin)


def inverse_frequencies(rope: RopeConfig, max_seq_len: int) -> Frequencies:
    """Return the inverse frequencies ``[rotary_dim / 2]`` (float32) and the attention factor.

    Args:
        rope: the kind and its parameters.
        max_seq_len: most tokens of one sequence: ``longrope`` takes its long factors if that is
            beyond the original context, for all sequences, since cached keys cannot change sides.

    Raises:
        ModelLoadError: the kind is unknown or lacks a parameter.
    """
    if rope.rope_type not in ROPE_KINDS:
        raise ModelLoadError(
            f"rope_type={rope.rope_type!r} in config.json is not supported; supported: "
            f"{', '.join(sorted(ROPE_KINDS))}.{nearest(rope.rope_type, ROPE_KINDS)}"
        )
    try:
        return ROPE_KINDS[rope.rope_type](rope, max_seq_len)
    except KeyError as error:
        raise ModelLoadError(
            f"rope_parameters in config.json lack {error.args[0]!r}, "
            f"which rope_type={rope.rope_type!r} needs"
        ) from error


def _default(rope: RopeConfig, max_seq_len: int) -> Frequencies:  # noqa: ARG001
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / (rope.theta**exponents), 1.0


def _linear(rope: RopeConfig, max_seq_len: int) -> Frequencies:
    """Position interpolation (Chen et al., 2023)."""
    inverse, _ = _default(rope, max_seq_len)
    return inverse / rope.parameters["factor"], 1.0


def _dynamic(rope: RopeConfig, max_seq_len: int) -> Frequencies:
    """Dynamic NTK scaling, up to the original context: there it changes nothing.

    Beyond it every new length would have its own frequencies, which keys already in the cache
    do not have; ``ModelConfig.max_position`` ends where this is exact.
    """
    return _default(rope, max_seq_len)


def _llama3(rope: RopeConfig, max_seq_len: int) -> Frequencies:
    """Llama 3.1: long wavelengths are divided by ``factor``, medium ones in part."""
    inverse, _ = _default(rope, max_seq_len)
    factor = rope.parameters["factor"]
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    original = rope.original_max_position
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, smoothed, scaled), 1.0


def _yarn(rope: RopeConfig, max_seq_len: int) -> Frequencies:  # noqa: ARG001
    """YaRN (Peng et al., 2023), its attention factor included."""
    parameters, dim = rope.parameters, rope.rotary_dim
    factor = parameters["factor"]
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)

    def correction_dim(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = correction_dim(parameters.get("beta_fast") or 32)
    high = correction_dim(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # else the ramp would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    interpolated, extrapolated = 1.0 / (factor * frequencies), 1.0 / frequencies
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep, float(attention_factor)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, max_seq_len: int) -> Frequencies:
    """LongRoPE (Ding et al., 2024): a factor for each frequency."""
    parameters, original = rope.parameters, rope.original_max_position
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        factor = parameters["factor"]
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    chosen = parameters["long_factor" if max_seq_len > original else "short_factor"]
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    factors = torch.tensor(chosen, dtype=torch.float32)
    if factors.shape != exponents.shape:
        raise ModelLoadError(
            f"rope_parameters of config.json hold {len(factors)} longrope factors, "
            f"but heads of {rope.rotary_dim} rotated elements need {len(exponents)}"
        )
    return 1.0 / (factors * rope.theta**exponents), float(attention_factor)


def _proportional(rope: RopeConfig, max_seq_len: int) -> Frequencies:  # noqa: ARG001
    """Only the first share of the frequencies turns; the rest stands still."""
    dim = rope.rotary_dim
    turning = int(rope.parameters.get("partial_rotary_factor", 1.0) * dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.int64).float() / dim
    still = torch.zeros(dim // 2 - turning)
    inverse = torch.cat((1.0 / (rope.theta**exponents), still))
    return inverse / rope.parameters.get("factor", 1.0), 1.0


ROPE_KINDS: Mapping[str, Callable[[RopeConfig, int], Frequencies]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "yarn": _yarn,
        "longrope": _longrope,
        "llama3": _llama3,
        "proportional": _proportional,
    }
)
"""Every supported kind, by transformers' name."""
