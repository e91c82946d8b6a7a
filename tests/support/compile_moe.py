"""Compiles the launches of experts for a card that is not here; a script, without interpreter.

Prints one JSON object a kernel: its name, what is compiled in, whether its shared memory is there,
the bytes that a thread spills from its registers, as the assembler says, and how many instructions
read what a product is still writing.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minisgl.moe import ExpertScales
from minisgl.moe.fp8 import FP8
from minisgl_moe_triton.backend import run_launch
from minisgl_moe_triton.configs import Grouped, Key, Launch, rule_of_thumb
from minisgl_moe_triton.kernels.routing import Routed
from support.compile_kernels import AbsentCard

SHARED = {89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program can have, by compute capability."""
TOP_K = 8


def spilled(ptx: str, capability: int) -> int:
    """Return the bytes that a thread stores in memory for lack of registers."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        suffix = "a" if capability >= 90 else ""
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{capability}{suffix}", str(file)]
        done = subprocess.run(
            [*command, "-o", str(Path(folder) / "out")], capture_output=True, text=True, check=True
        )
    return sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", done.stderr))


def early_reads(ptx: str) -> int:
    """Return how many instructions use registers of Hopper's products that nobody waited for."""
    pending: list[set[str]] = [set()]
    early = 0
    for commented in ptx.splitlines():
        line = commented.partition("//")[0]
        registers = set(re.findall(r"%[rf]\d+", line))
        if "wgmma.mma_async" in line:
            found = re.search(r"\{([^}]*)\}", line)
            assert found is not None, line
            pending[-1] |= set(re.findall(r"%[rf]\d+", found[1]))
        elif "wgmma.commit_group" in line:
            pending.append(set())
        elif waited := re.search(r"wgmma.wait_group\S* (\d+)", line):
            keep = int(waited[1]) + 1
            pending = pending[-keep:]
        elif any(registers & group for group in pending):
            early += 1
    return early


def print_compiled(capability: int) -> None:
    """Let launches end after compiling, and say what was compiled."""
    driver.set_active(AbsentCard(capability))
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    run, seen = JITFunction.run, set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert grid is not None
        assert not warmup
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash in seen:
            return
        seen.add(kernel.hash)
        facts = {"kernel": self.__name__, "spilled": spilled(kernel.asm["ptx"], capability)}
        facts["fits"] = kernel.metadata.shared <= SHARED[capability]
        facts["fp8_products"] = len(re.findall(r"(?:wgmma|mma)\S*e4m3", kernel.asm["ptx"]))
        facts["early_reads"] = early_reads(kernel.asm["ptx"])
        facts["constants"] = [
            value for value, one in zip(args, self.params, strict=False) if one.is_constexpr
        ]
        facts["warps"] = options["num_warps"]
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    JITFunction.run = compile_only


def run_layer(launch: Launch, experts: int, hidden: int, inner: int) -> None:
    """Launch a layer in fp8, on tensors of the CPU that nobody fills."""
    some = torch.empty(2, hidden, dtype=torch.bfloat16)
    chosen = torch.zeros(2, TOP_K, dtype=torch.int32)
    stand_in = torch.empty(16, dtype=FP8)[:1]
    scale = torch.empty(16)[:1]
    run_launch(
        some,
        Routed(chosen, torch.ones(2, TOP_K)),
        stand_in.expand(experts, 2 * inner, hidden),
        stand_in.expand(experts, hidden, inner),
        launch,
        gelu=False,
        scales=ExpertScales(scale.expand(experts, 2 * inner), scale.expand(experts, hidden)),
    )


def main(capability: int) -> None:
    print_compiled(capability)
    for experts, inner, hidden in ((128, 768, 2048), (8, 200, 360)):
        key = Key(
            experts=experts, inner=inner, hidden=hidden, dtype="float8_e4m3fn", device="any",
            triton="3.6",
        )  # fmt: skip
        launches = rule_of_thumb(key, TOP_K, SHARED[capability])
        unique = dict.fromkeys(one.model_copy(update={"tokens": 1}) for one in launches)
        for launch in unique:
            run_layer(launch, experts, hidden, inner)
            if isinstance(launch, Grouped) and capability >= 90:
                copied = {
                    name: getattr(launch, name).model_copy(update={"tma": True})
                    for name in ("gate_up", "down")
                }
                run_layer(launch.model_copy(update=copied), experts, hidden, inner)


if __name__ == "__main__":
    main(int(sys.argv[1]))
