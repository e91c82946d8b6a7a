"""The measurements of attention backends that settings point at, checked against the device."""

import platform
from pathlib import Path

import torch

from minisgl.plugins.measurements import Measurements, read_measurements
from minisgl.settings import Settings


def load_measurements(
    settings: Settings, dtype: str, device: torch.device | None
) -> Measurements | None:
    """Return what ``attention.measurements`` points at, or ``None`` if it is not set.

    Args:
        settings: also say how many rows will decode at most.
        dtype: that the model runs in, such as ``bfloat16``.
        device: that it runs on; ``None``: it is not here, so that nobody can compare.

    Raises:
        SettingsError: the file is none, or from another device or dtype.
    """
    path = settings.attention.measurements
    if path is None:
        return None
    found = read_measurements(path, settings.scheduler.max_running_requests)
    found.check(found.device if device is None else device_name(device), dtype)
    return found


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    return cpu_name()


def cpu_name() -> str:
    """Return the model of the CPU, or its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
