"""From bytes to pages: how large the KV pool becomes, and the table that explains it."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl.errors import DoesNotFitError

logger = logging.getLogger(__name__)

_CPU_POOL_BYTES = 4 * 2**30
"""Without ``cache.num_pages`` a pool in main memory stays under this: other programs live there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device, in bytes: all there is, and what is free now."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What steps take besides weights and pool, in bytes.

    Attributes:
        activations: of the largest step, free again between steps.
        graphs: of recorded decode steps; allocated already when the device is measured.
        controls: what rows keep for penalties, biases and masks; allocated already on a GPU, and
            on a CPU taken page by page once requests use it.
    """

    activations: int = 0
    graphs: int = 0
    controls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the memory of a device is used for, in bytes.

    Attributes:
        total: of the device.
        used: before the KV pool: weights, and whatever else runs there.
        weights: of the model, for the table.
        needs: of steps.
        bytes_per_page: of the KV pool.
        page_size: tokens a page.
        num_pages: pages for requests; the pool has one more, the dummy page.
        in_main_memory: the device is the CPU.
    """

    total: int
    used: int
    weights: int
    needs: Needs
    bytes_per_page: int
    page_size: int
    num_pages: int
    in_main_memory: bool = False

    def table(self) -> str:
        """Return the plan as aligned text."""
        pool = (self.num_pages + 1) * self.bytes_per_page
        num_tokens = self.num_pages * self.page_size
        in_use = f"of which weights {self.weights / 2**30:.2f} GiB"
        if self.needs.graphs:
            in_use += f", CUDA graphs {self.needs.graphs / 2**30:.2f} GiB"
        if self.needs.controls and not self.in_main_memory:
            in_use += f", penalties and masks {self.needs.controls / 2**30:.2f} GiB"
        rows = [
            ("device memory", self.total, ""),
            ("in use", self.used, in_use),
            (
                "KV pool",
                pool,
                f"{self.num_pages} pages of {self.page_size} = {num_tokens} tokens",
            ),
            ("left", self.total - self.used - pool, ""),
        ]
        if self.needs.activations:
            rows.insert(2, ("activations", self.needs.activations, "of the largest step"))
            rows[-1] = ("left", rows[-1][1] - self.needs.activations, "")
        if self.needs.controls and self.in_main_memory:
            rows.insert(
                2, ("controls", self.needs.controls, "penalties and masks, if all use them")
            )
            rows[-1] = ("left", rows[-1][1] - self.needs.controls, "")
        return "\n".join(
            f"  {what:<14}{size / 2**30:>9.2f} GiB  {note}".rstrip() for what, size, note in rows
        )


def plan_memory(
    memory: DeviceMemory,
    *,
    fraction: float,
    weights: int,
    needs: Needs,
    bytes_per_page: int,
    page_size: int,
    num_pages: int | None,
    max_useful_tokens: int,
    in_main_memory: bool,
    num_sharers: int = 1,
) -> MemoryPlan:
    """Decide the number of pages.

    Args:
        memory: measured with the weights loaded.
        fraction: of the total that weights and pool may take together.
        weights: bytes of the model.
        needs: what steps take.
        bytes_per_page: over all layers.
        page_size: tokens a page.
        num_pages: the user's own number, taken as it is.
        max_useful_tokens: more could never be used at once.
        in_main_memory: the device is the CPU.
        num_sharers: ranks that divide the device's memory among them.

    Raises:
        DoesNotFitError: not even two pages fit; says what to change.
    """
    used = memory.total - memory.free
    if num_pages is None:
        budget = int(memory.total * fraction) - used - needs.activations
        if in_main_memory:
            budget -= needs.controls * num_sharers
            budget = min(budget, _CPU_POOL_BYTES)
        budget //= num_sharers
        useful = -(-max_useful_tokens // page_size)
        num_pages = min(budget // bytes_per_page - 1, useful)
        if num_pages < 2:
            share = f" for each of {num_sharers} ranks" if num_sharers > 1 else ""
            raise DoesNotFitError(
                f"no room for a KV pool: {memory.total / 2**30:.2f} GiB x engine.memory_fraction "
                f"{fraction} less {used / 2**30:.2f} GiB in use and "
                f"{needs.activations / 2**30:.2f} GiB of activations leaves "
                f"{budget / 2**30:.2f} GiB{share}, and a page of {page_size} tokens takes "
                f"{bytes_per_page / 2**20:.2f} MiB; raise engine.memory_fraction, free memory, or "
                "take a smaller model or dtype"
            )
    return MemoryPlan(
        total=memory.total,
        used=used,
        weights=weights,
        needs=needs,
        bytes_per_page=bytes_per_page,
        page_size=page_size,
        num_pages=num_pages,
        in_main_memory=in_main_memory,
    )


def measure(device: torch.device) -> DeviceMemory:
    """Return the memory of a device; for the CPU that of the machine or its control group."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, free=free)
    return _main_memory()


def _main_memory() -> DeviceMemory:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {key: int(rest.split()[0]) * 1024 for key, rest in (x.split(":") for x in lines)}
        memory = DeviceMemory(total=sizes["MemTotal"], free=sizes["MemAvailable"])
    except (OSError, ValueError, KeyError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(total=total, free=total)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return memory
    if limit >= memory.total:
        return memory
    return DeviceMemory(total=limit, free=min(memory.free, max(limit - used, 0)))
