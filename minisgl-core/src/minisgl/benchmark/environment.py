"""Where a benchmark ran: commit, versions, device and settings, to be kept beside its figures."""

import datetime as dt
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import minisgl
from minisgl.plugins.discovery import find_candidates
from minisgl.settings import ResolvedSettings, Settings
from minisgl.settings.resolve import setting_value

_PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-4", "transformers", "numpy")
"""What is named beside the distributions of ours, where it is installed."""


def describe_environment(
    command: Sequence[str], commit: str | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Return command, time, commit, versions and device as plain data.

    Args:
        command: the words of the command line.
        commit: what to say where the code does not run from its checkout.
        device: the setting ``engine.device``.
    """
    return {**describe_code(command, commit), "device": device_facts(device)}


def describe_code(command: Sequence[str], commit: str | None = None) -> dict[str, Any]:
    """Return the same without the device, for a program that runs on none; imports no torch."""
    import shlex

    return {
        "command": shlex.join(command),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit or find_commit(),
        "versions": versions(),
    }


def process_age() -> float | None:
    """Return the seconds since this process was started; ``None`` where the system does not say."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii")
    except OSError:
        return None
    # The name in parentheses may hold spaces; after it come fields 3 and on, 22 is the start.
    ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def find_commit() -> str | None:
    """Return the commit of the checkout that this code runs from, ``+changes`` if it was edited.

    ``None`` outside of a checkout: an installed package may lie in somebody else's repository.
    """
    file = Path(minisgl.__file__)
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    changed = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def versions() -> dict[str, str]:
    """Return the version of Python and of each installed package that matters to speed."""
    plugins = [one.distribution for one in find_candidates()]
    ours = [name for name in plugins if name.startswith("minisgl-")]
    found = {"python": platform.python_version()}
    for name in (*_PACKAGES, *ours):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_facts(device: str) -> dict[str, Any]:
    """Return the name of the GPU and the CUDA version, or what there is to say about the CPU."""
    import torch

    from minisgl.bootstrap.measurements import cpu_name

    facts: dict[str, Any] = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))}
    if device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties("cuda" if device == "auto" else device)
        return facts | {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return facts | {"name": facts["cpu"], "threads": torch.get_num_threads()}


def changed_settings(resolved: ResolvedSettings) -> dict[str, Any]:
    """Return every setting that differs from its default, by dotted name; secrets stay masked."""
    defaults = Settings()
    changed = {}
    for name, value, _ in resolved.entries():
        is_option = name.startswith("backend_options.")
        if is_option or value != setting_value(defaults, name):
            changed[name] = str(value) if isinstance(value, Path) else value
    return changed


def _git(folder: Path, *words: str) -> str | None:
    """Return what git says, or ``None`` if it fails or is not there."""
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", str(folder), *words],  # noqa: S607
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
