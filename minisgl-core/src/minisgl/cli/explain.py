"""``minisgl plugins explain``: what ``auto`` would choose for a model, and why not the others.

If the settings name backends that cannot run, or attention backends that cannot be a pair, it says
so too.
"""

import argparse
import json
import re
from dataclasses import asdict, fields, replace
from typing import Any

from minisgl.errors import SettingsError, UnsupportedBackendError
from minisgl.plugins import BackendQuery
from minisgl.plugins.decisions import Decision, format_decisions
from minisgl.plugins.host import PluginHost
from minisgl.plugins.lazy import load_object
from minisgl.plugins.measurements import Measurements
from minisgl.plugins.model_selection import ModelSelection, select_model
from minisgl.plugins.query import build_query
from minisgl.plugins.selection import (
    AUTO,
    explain_attention,
    explain_moe,
    explain_ops,
    select_attention,
    select_exchange,
    select_kv_pool,
    select_moe,
)
from minisgl.settings import Settings


def explain(args: argparse.Namespace, settings: Settings, host: PluginHost) -> int:
    """Print each candidate's rank or reason; works without a GPU."""
    query, model = _query(settings, host, args.compute_capability)
    measured = _measurements(settings, query) if args.kind == "attention" else None
    table = model.table if args.kind == "model" else _decide(args.kind, host, query, measured)
    problem = _problem(args.kind, settings, host, query)
    if args.json:
        decisions = [asdict(row) for row in table]
        answer = {"query": asdict(query), "decisions": decisions, "problem": problem}
        print(json.dumps(answer, indent=2))
        return 0
    capability = query.compute_capability
    shown = "none" if capability is None else f"{capability[0]}.{capability[1]}"
    of_weights = f" in {query.moe_weights_dtype}" if query.moe_weights_dtype else ""
    print(
        f"device {query.device} (compute capability {shown}), dtype {query.dtype}, page size"
        f" {query.page_size}, {query.num_q_heads} q heads, {query.num_kv_heads} kv heads, head dim"
        f" {query.head_dim}, {query.num_experts} experts{of_weights}"
    )
    print(format_decisions(table))
    if problem is not None:
        print(problem)
    if args.kind == "model" and model.warning:
        print(f"{model.warning}.")
    if measured is not None and query.device == "cuda" and not _gpu_is_here():
        print(f"{measured.file} is of {measured.device}; there is no GPU here to compare with.")
    if args.kind == "moe" and not query.num_experts:
        print("The model is dense: no MoE backend is created.")
    if query.device == "cuda" and capability is None:
        print("There is no GPU here. To ask for one, give --compute-capability 9.0.")
    if query.device != "cuda":
        print("Backends that need a GPU are refused here. To ask for one, give --device cuda.")
    return 0


def _measurements(settings: Settings, query: BackendQuery) -> Measurements | None:
    """Return what ``attention.measurements`` holds; on another machine the device cannot differ."""
    from minisgl.bootstrap import resolve_device
    from minisgl.bootstrap.measurements import load_measurements

    here = query.device != "cuda" or _gpu_is_here()
    return load_measurements(
        settings, query.dtype, resolve_device(settings.engine.device) if here else None
    )


def _decide(
    kind: str, host: PluginHost, query: BackendQuery, measured: Measurements | None
) -> tuple[Decision, ...]:
    if kind == "attention":
        return explain_attention(host, query, measured)
    if kind == "moe":
        return explain_moe(host, query)
    from minisgl.kernel.ops import OpTable

    return explain_ops(host, query, [entry.name for entry in fields(OpTable)])


def _problem(kind: str, settings: Settings, host: PluginHost, query: BackendQuery) -> str | None:
    """Return why the backends of that kind that the settings name cannot run, if they cannot."""
    options, moe = settings.backend_options, settings.moe
    try:
        if kind == "attention" and settings.attention.backend != AUTO:  # the table is about auto
            select_attention(host, query, settings.attention.backend, options)
        if kind == "moe" and not query.num_experts and moe.backend != AUTO:
            host.moe.get(moe.backend)  # nothing runs it, but a typo must show, as at a start
        if kind == "moe" and query.num_experts:
            select_moe(host, query, moe.backend, options)
            if query.expert_parallel_size > 1:
                select_exchange(host, query, moe.exchange, options)
    except UnsupportedBackendError as error:
        return str(error)
    return None


def _query(
    settings: Settings, host: PluginHost, capability: str | None
) -> tuple[BackendQuery, ModelSelection]:
    """Ask for what ``serve`` would ask for, from the model's configuration alone."""
    if settings.model.path is None:
        raise SettingsError("explain needs a model: give --model PATH_OR_ID.")
    import torch

    from minisgl.bootstrap import resolve_dtype
    from minisgl.bootstrap.experts import check_expert_parallel, moe_weights_dtype
    from minisgl.models.opening import open_checkpoint

    path = host.resolve_checkpoint(settings.model.path, settings.model.cache_dir)
    checkpoint = open_checkpoint(path, settings.model.load_format)
    model = select_model(host, checkpoint.architectures, settings.model.implementation)
    config = load_object(model.record.config_reader)(checkpoint.hf_config)
    check_expert_parallel(settings, config)
    device, found = _device(settings.engine.device)
    resolved = resolve_dtype(settings.model.dtype, config.dtype, torch.device(device))
    dtype = str(resolved).removeprefix("torch.")
    query = build_query(
        config,
        device=device,
        compute_capability=found if capability is None else _parse_capability(capability),
        dtype=dtype,
        kv_dtype=dtype,
        page_size=settings.cache.page_size,
        tensor_parallel_size=settings.parallel.tensor_parallel_size,
        expert_parallel_size=settings.parallel.expert_parallel_size,
        moe_weights_dtype=moe_weights_dtype(settings, config),
    )
    pool = select_kv_pool(host, query, settings.cache.pool, settings.backend_options)
    return replace(query, kv_layout=pool.record.capabilities.kv_layout), model


def _device(device: str) -> tuple[str, tuple[int, int] | None]:
    """Return the device's type and, of a CUDA device that is here, its compute capability."""
    import torch

    here = torch.cuda.is_available()
    kind = ("cuda" if here else "cpu") if device == "auto" else device.partition(":")[0]
    if kind != "cuda" or not here:
        return kind, None
    capability: Any = torch.cuda.get_device_capability(None if device == "auto" else device)
    return kind, (capability[0], capability[1])


def _gpu_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


def _parse_capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None:
        raise SettingsError(f"--compute-capability {text!r} must be written as 9.0.")
    return int(match[1]), int(match[2])
