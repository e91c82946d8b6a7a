"""Compares what a backend declares with what it is asked to run on."""

from types import MappingProxyType
from typing import Any, Final

from minisgl.plugins.records import BackendQuery, Capabilities, MoeBackendRecord

WEIGHTS_DTYPES: Final = MappingProxyType({"fp8": "float8_e4m3fn"})
"""What ``moe.weights_dtype`` may be beside ``auto``, and the dtype that is meant."""

FP8_CAPABILITY: Final = (8, 9)
"""The first NVIDIA GPUs that know float8_e4m3fn."""


def unmet_requirement(
    capabilities: Capabilities, query: BackendQuery, phase: str = "any"
) -> str | None:
    """Return the first requirement that the query misses, with both values, or ``None``.

    Args:
        capabilities: what the backend declares.
        query: what it is asked to run on.
        phase: ``prefill`` or ``decode`` of attention; ``any`` for all else.
    """
    if phase != "any" and phase not in capabilities.phases:
        return f"it serves {' and '.join(capabilities.phases) or 'no phase'}, not {phase}"
    choices: list[tuple[str, tuple[object, ...] | None, object]] = [
        ("device", capabilities.devices, query.device),
        ("dtype", capabilities.dtypes, query.dtype),
        ("KV dtype", capabilities.kv_dtypes, query.kv_dtype),
        ("page size", capabilities.page_sizes, query.page_size),
        ("head dim", capabilities.head_dims, query.head_dim),
    ]
    if phase != "any":  # which is asked of attention alone: of what reads the pool
        choices.append(("KV layout", (capabilities.kv_layout,), query.kv_layout))
    for what, allowed, found in choices:
        if allowed is not None and found not in allowed:
            return f"needs {what} {alternatives(allowed)}, found {found}"
    if query.device == "cuda" and capabilities.min_compute_capability is not None:
        needed = capabilities.min_compute_capability
        if query.compute_capability is None or query.compute_capability < needed:
            found = _version(query.compute_capability)
            return f"needs compute capability {_version(needed)}, found {found}"
    if phase == "any":
        return None  # experts and pools have no part in what follows
    if query.sliding_window and not capabilities.sliding_window:
        return "the model has sliding-window layers, it implements none"
    if query.logit_soft_cap and not capabilities.logit_soft_cap:
        return "the model caps attention scores, it does not implement that"
    return None


def unmet_weights_dtype(record: MoeBackendRecord[Any], query: BackendQuery) -> str | None:
    """Return why an MoE backend cannot run experts of the dtype that is asked for, or ``None``."""
    wanted = query.moe_weights_dtype
    if wanted is None:
        return None
    value = next((name for name, dtype in WEIGHTS_DTYPES.items() if dtype == wanted), wanted)
    setting = f"moe.weights_dtype={value!r}; 'auto' is {query.dtype}"
    if wanted not in record.weights_dtypes:
        known = alternatives((query.dtype, *record.weights_dtypes))
        return f"needs experts in {known}, found {wanted} ({setting})"
    if query.device == "cuda" and (query.compute_capability or FP8_CAPABILITY) < FP8_CAPABILITY:
        needed, found = _version(FP8_CAPABILITY), _version(query.compute_capability)
        return f"experts in {wanted} need compute capability {needed}, found {found} ({setting})"
    return None


def alternatives(allowed: tuple[object, ...]) -> str:
    """Write ``8, 16 or 32``."""
    words = [str(value) for value in allowed]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "none"


def _version(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else f"{capability[0]}.{capability[1]}"
