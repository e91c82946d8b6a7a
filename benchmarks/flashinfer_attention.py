"""FlashInfer's attention kernels as the backend runs them: inside CUDA graphs, and eagerly.

Decode: microseconds a layer and the bandwidth at which K and V are read, tensor cores beside CUDA
cores, with the host's time for the plan before a replay. Prefill: TFLOP/s of each template. The
rule of ``minisgl_attn_flashinfer/choice.py`` follows these numbers. Needs an NVIDIA GPU, FlashInfer
and its compiled kernels::

    python benchmarks/flashinfer_attention.py
    python benchmarks/flashinfer_attention.py --heads 32/4 --rows 1,8,64 --lengths 4096-12288
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from minisgl.kernel.ops import OpTable
from minisgl.plugins import BackendQuery
from minisgl.plugins.host import load_plugins
from minisgl.plugins.selection import select_ops
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_flashinfer.backend import FlashInferBackend
from minisgl_attn_flashinfer.create import create_backend
from minisgl_attn_flashinfer.modules import CUDA_CORE_GROUPS
from minisgl_attn_flashinfer.settings import FlashInferSettings

_CACHE_BYTES = 200e6  # a replay reads more than any L2 cache holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="16/8,32/8,64/8,40/8,8/8", help="q/kv heads")
    parser.add_argument("--rows", default="1,2,4,8,16,32,33,64,128,256")
    parser.add_argument("--lengths", default="450-1350", help="tokens of the rows: FROM-TO")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--prefill", default="1x8192,16x1024,1x512", help="prompts x tokens")
    args = parser.parse_args()
    low, high = (int(part) for part in args.lengths.split("-"))
    for heads in args.heads.split(","):
        q_heads, kv_heads = (int(part) for part in heads.split("/"))
        shape = {
            "page_size": args.page_size,
            "num_q_heads": q_heads,
            "num_kv_heads": kv_heads,
            "head_dim": args.head_dim,
        }
        print(f"\ndecode, {heads} heads of {args.head_dim}, rows of {low} to {high} tokens")
        print("  rows   tensor us  TB/s   cuda us  TB/s   host us: tensor  cuda")
        for rows in (int(part) for part in args.rows.split(",")):
            print_decode(shape, np.random.default_rng(0).integers(low, high + 1, size=rows))
        print(f"prefill, {heads} heads of {args.head_dim}: TFLOP/s of fa2, fa3")
        for prompts in args.prefill.split(","):
            number, tokens = (int(part) for part in prompts.split("x"))
            print_prefill(shape, [tokens] * number)


def print_decode(shape: dict[str, int], lengths: np.ndarray) -> None:
    """Print one line: the same rows with both kernels."""
    row_bytes = 4 * shape["num_kv_heads"] * shape["head_dim"]
    layers = max(1, round(_CACHE_BYTES / (row_bytes * int(lengths.sum()))))
    rows = PagedRows(
        lengths.tolist(),
        num_layers=min(layers, 32),
        dtype=torch.bfloat16,
        device="cuda",
        ops=_ops(shape),
        **shape,
    )
    group = shape["num_q_heads"] // shape["num_kv_heads"]
    kernels = ["tensor", "cuda"] if group in CUDA_CORE_GROUPS else ["tensor"]
    backends = {
        name: create_backend(
            rows.context, FlashInferSettings.model_validate({"decode_kernel": name})
        )
        for name in kernels
    }
    rows.allocate()
    line, hosts = f"{len(lengths):6d}", ""
    for name in ("tensor", "cuda"):
        if name not in backends:
            line += "         -     -"
            continue
        device, host = time_decode(rows, backends[name], lengths.astype(np.int32))
        line += f"   {device:8.1f}  {row_bytes * lengths.sum() / device / 1e6:.2f}"
        hosts += f"   {host:8.1f}"
    print(line, hosts, flush=True)


def time_decode(
    rows: PagedRows, backend: FlashInferBackend, lengths: np.ndarray
) -> tuple[float, float]:
    """Return microseconds of a layer on the device, and of a plan before a replay on the host."""
    graphs = backend.cuda_graphs
    assert graphs is not None
    q = rows.queries(len(lengths))
    with torch.inference_mode():
        batch = rows.batch([*range(len(lengths))], lengths.tolist())
        plan = graphs.prepare_capture(batch)
        graphs.enqueue(batch, plan)
        for layer in rows.layers:
            backend.attend(q * 1, layer, plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in rows.layers:
                backend.attend(q, layer, plan)
        device = _time(graph.replay) / len(rows.layers)
        began = time.perf_counter()
        for number in range(200):
            graphs.prepare_replay(plan, lengths, number % 2)
        host = (time.perf_counter() - began) / 200 * 1e6
        torch.cuda.synchronize()
    return device, host


def print_prefill(shape: dict[str, int], tokens: list[int]) -> None:
    """Print one line: the same prompts with both templates, and the host's time for a plan."""
    rows = PagedRows(tokens, dtype=torch.bfloat16, device="cuda", ops=_ops(shape), **shape)
    templates = ["fa2", "fa3"] if torch.cuda.get_device_capability()[0] == 9 else ["fa2"]
    backends = [
        create_backend(rows.context, FlashInferSettings.model_validate({"prefill_template": name}))
        for name in templates
    ]
    rows.allocate()
    q = rows.queries(sum(tokens))
    work = 2 * sum(n * n for n in tokens) * shape["num_q_heads"] * shape["head_dim"]
    line = f"  {len(tokens)} x {tokens[0]}:"
    with torch.inference_mode():
        batch = rows.batch([*range(len(tokens))], tokens, tokens)
        for backend in backends:
            took = _time(partial(backend.attend, q, rows.layers[0], backend.plan(batch, 0)))
            began = time.perf_counter()
            for number in range(50):
                backend.plan(batch, number % 2)
            host = (time.perf_counter() - began) / 50 * 1e6
            torch.cuda.synchronize()
            line += f"  {work / took / 1e6:.0f} (plan {host:.0f} us)"
    print(line, flush=True)


def _time(run: Callable[[], object], repeats: int = 30) -> float:
    """Return the median microseconds of a run on the device."""
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
    return float(np.median(times))


def _ops(shape: dict[str, int]) -> OpTable:
    query = BackendQuery(
        device="cuda",
        compute_capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        **shape,  # type: ignore[arg-type]
    )
    return select_ops(load_plugins(), query)


if __name__ == "__main__":
    main()
