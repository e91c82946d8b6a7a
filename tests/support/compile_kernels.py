"""Compiles every Triton kernel for a card that is not here; run as a script, without interpreter.

Prints one JSON object a compilation: the kernel's name, and its widest read of global memory.
"""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minisgl.kernel import Rotation
from minisgl.kernel.controls import ControlTensors
from minisgl.kernel.rows import DecodeInputs, RowTensors


class AbsentCard:
    """What Triton asks of the driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(capability: int) -> None:
    """Call each operation on tensors of the CPU, with launches that end after compiling."""
    driver.set_active(AbsentCard(capability))
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        reads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
        widest = max((int(count or 1) * int(bits) for count, bits in reads), default=0)
        copies = re.findall(
            r"cp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, 0x(\w+)", kernel.asm["ptx"]
        )
        widest = max([widest, *(8 * int(size, 16) for size in copies)])
        sys.stdout.write(json.dumps({"kernel": self.__name__, "bits": widest}) + "\n")

    JITFunction.run = compile_only
    call_all(torch.bfloat16)


def call_all(dtype: torch.dtype) -> None:
    from minisgl.kernel import triton as ops
    from minisgl.kernel.triton.attention import Cut, longest_first, paged_decode
    from minisgl.kernel.triton.attention_step import PagedRows, Scores
    from minisgl.kernel.triton.prefill_attention import paged_prefill
    from minisgl.kernel.triton.shared_prefix import shared_decode

    x, gated = torch.empty(4, 1024, dtype=dtype), torch.empty(4, 6144, dtype=dtype)
    ops.rms_norm(x, x[0], 1e-6)
    ops.add_rms_norm(x, x.clone(), x[0], 1e-6)
    matrix = torch.empty(1024, 1024, dtype=dtype)
    one, some = torch.empty(1, 1, 1024, dtype=dtype), torch.empty(1, 16, 1024, dtype=dtype)
    for parts in (one, some, torch.empty(2, 16, 1024)):
        ops.linear_parts(parts[0].to(dtype), matrix, None)
        residual = torch.empty(parts.shape[1:], dtype=dtype)
        ops.add_norm_linear(parts, residual, x[0], 1e-6, matrix, None)
        ops.add_norm_gated(parts, residual, x[0], 1e-6, matrix, None, gelu=False)
    ops.silu_and_mul(gated)
    ops.gelu_and_mul(gated)
    longs, ints = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
    floats, table = torch.empty(4), torch.empty(4, 9, dtype=torch.int32)
    for dim, rotary in ((128, 128), (96, 64)):
        qkv, weight = torch.empty(4, 32, dim, dtype=dtype), torch.empty(dim, dtype=dtype)
        pool = torch.empty(9, 8, dim, dtype=dtype)
        rotation = Rotation(longs, torch.empty(9, rotary))
        norms: dict[str, Any] = {"q_norm": weight, "k_norm": weight, "norm_eps": 1e-6}
        ops.rope_store(qkv, 16, 8, rotation, longs, pool, pool, **norms)
        ops.rope(qkv[:, :24], 16, rotation, **norms)
        ops.store_kv(qkv[:, 16:24], qkv[:, 24:], longs, pool, pool)
    ops.page_indices(table, longs, ints, 16, ints, ints, ints)
    rows = RowTensors(table, longs, longs, longs[:3], floats, floats, floats, longs, longs)
    ops.apply_plan(ints, rows)
    ops.advance_rows(rows, DecodeInputs.allocate(3, torch.device("cpu")), 16)
    logits = torch.empty(4, 151_936, dtype=dtype)
    ops.sample_gumbel(logits, floats, longs, longs)
    ops.sample_filtered(logits, floats, longs, floats, floats, longs, longs)
    ops.mask_tokens(logits, longs, torch.empty(4, 4748, dtype=torch.int32), longs)
    state = ControlTensors(
        torch.empty(4, 151_936, dtype=torch.int32), ints, *[floats] * 3, *[ints] * 6
    )
    ops.penalize(logits.float(), longs, state)
    q, pool = torch.empty(4, 40, 128, dtype=dtype), torch.empty(64, 8, 128, dtype=dtype)
    paged = PagedRows(page_table=table, rows=longs, kv_lens=ints, page_size=16)
    for cut in (Cut(1), Cut(1, wide=True), Cut(8)):
        paged_decode(q, pool, pool, paged, Scores(scale=1.0), cut)
    longest_first(ints, ints)
    paged_decode(q, pool, pool, replace(paged, order=ints), Scores(scale=1.0), Cut(1))
    shared = ints, torch.empty(16, 3, dtype=torch.int32), ints
    shared_decode(q, pool, pool, paged, Scores(scale=1.0), shared, (2, 1))
    paged_prefill(q, pool, pool, paged, Scores(scale=1.0), ints, 256)


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
