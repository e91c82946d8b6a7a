"""The composition root: from settings and plugins to an engine and a scheduler.

The one place that knows all parts. ``server`` calls it in the scheduler's process, ``llm`` in its
own; nothing below imports it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from minisgl.attention.hybrid import HybridBackend
from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.distributed.communicator import Communicator, SingleCommunicator
from minisgl.engine.engine import Engine, EngineInfo
from minisgl.engine.memory_plan import MemoryPlan, measure, plan_memory
from minisgl.errors import ModelLoadError, SettingsError
from minisgl.kvcache.interface import KVCachePool, KVPoolSpec
from minisgl.layers.base import shard_heads
from minisgl.layers.context import BuildContext
from minisgl.models.checkpoint import Checkpoint, open_checkpoint
from minisgl.models.config import ModelConfig
from minisgl.models.interface import BaseLLMModel
from minisgl.models.loading import fill_dummy, load_weights
from minisgl.moe.interface import MoeBackend, MoeContext
from minisgl.plugins.decisions import Decision, log_decisions
from minisgl.plugins.host import PluginHost, load_plugins
from minisgl.plugins.records import BackendQuery, ModelRecord
from minisgl.plugins.selection import (
    AttentionSelection,
    select_attention,
    select_kv_pool,
    select_moe,
    select_ops,
    select_prefix_cache,
)
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.transport import Transport
from minisgl.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's sources, before anything is built."""

    checkpoint: Checkpoint
    config: ModelConfig
    record: ModelRecord


def load_host(settings: Settings) -> PluginHost:
    """Load the installed plugins as ``settings.plugins`` says."""
    return load_plugins(disabled=settings.plugins.disabled, strict=settings.plugins.strict)


def build_scheduler(
    settings: Settings,
    transport: Transport,
    host: PluginHost | None = None,
    *,
    progress: bool = True,
) -> Scheduler:
    """Load the model and return a scheduler that is ready to serve.

    Args:
        settings: everything.
        transport: the scheduler's two ends of the wire.
        host: the loaded plugins; loaded here if not given.
        progress: show progress bars.

    Raises:
        MinisglError: whatever is wrong, by the subclass and exit code that it belongs to.
    """
    host = host or load_host(settings)
    chosen_cache = select_prefix_cache(host, settings.cache.prefix, settings.backend_options)
    engine = build_engine(settings, host, progress=progress)
    info, scheduler = engine.info, settings.scheduler
    return Scheduler(
        engine,
        chosen_cache.record.create(info.page_size, chosen_cache.settings),
        transport,
        max_step_tokens=scheduler.max_prefill_tokens,
        overlap=_on(scheduler.overlap, auto=info.asynchronous),
        mixed=_on(scheduler.launch, auto=info.mixed_launches, on="mixed"),
        seed=settings.engine.seed,
        observers=host,
    )


def build_engine(settings: Settings, host: PluginHost, *, progress: bool = True) -> Engine:
    """Load the model onto its device and size the KV pool; see ``build_scheduler`` for errors."""
    began = time.perf_counter()
    if settings.parallel.tensor_parallel_size != 1:
        raise SettingsError(
            f"parallel.tensor_parallel_size={settings.parallel.tensor_parallel_size}: this version "
            "runs on one device; set it to 1"
        )
    device = resolve_device(settings.engine.device)
    if settings.engine.num_threads is not None:
        torch.set_num_threads(settings.engine.num_threads)
    source = _open_model(settings, host)
    config = source.config
    dtype = resolve_dtype(settings.model.dtype, config.dtype, device)
    max_seq_len = _max_seq_len(settings, config)
    communicator = SingleCommunicator()
    query = backend_query(settings, config, device, dtype, communicator)
    pool, pool_rows = _create_pool(settings, host, config, query, device, dtype)
    chosen = select_attention(
        host, query, settings.attention.backend, settings.backend_options
    )
    attention = _create_attention(settings, config, pool, chosen, max_seq_len)
    moe, moe_rows = _create_moe(settings, host, config, query, device, dtype)
    log_decisions([*chosen.table, *moe_rows, *pool_rows])
    context = BuildContext(
        device=device,
        dtype=dtype,
        communicator=communicator,
        ops=select_ops(host, query),
        attention=attention,
        moe=moe,
        kv_pool=pool,
        max_seq_len=max_seq_len,
    )
    model = _build_model(settings, source, context, progress=progress)
    plan = _plan_pool(settings, model, pool, max_seq_len)
    pool.allocate(plan.num_pages + 1)
    logger.info("memory of %s:\n%s", device, plan.table())
    info = _engine_info(settings, source, plan, query, max_seq_len, chosen)
    engine = Engine(model, attention, info, device)
    engine.warm_up()
    logger.info("%s is ready after %.1f s", info.architecture, time.perf_counter() - began)
    return engine


def resolve_device(name: str) -> torch.device:
    """Return the device that ``engine.device`` means.

    Raises:
        SettingsError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"engine.device={name!r} is no device that torch knows") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"engine.device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices; set "
            "engine.device to cpu, or install a CUDA build of torch on a machine with a GPU"
        )
    return device


def resolve_dtype(name: str, of_checkpoint: str, device: torch.device) -> torch.dtype:
    """Return the dtype that ``model.dtype`` means.

    ``auto`` is the checkpoint's own on a GPU, and float32 on a CPU, where torch's 16-bit matrix
    products for single rows are several times slower.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else of_checkpoint
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def backend_query(
    settings: Settings,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    communicator: Communicator,
) -> BackendQuery:
    """Return what backends are asked whether they can run."""
    q_heads, kv_heads = shard_heads(
        config.num_q_heads, config.num_kv_heads, communicator.rank, communicator.size
    )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    name = str(dtype).removeprefix("torch.")
    return BackendQuery(
        device=device.type,
        compute_capability=capability,
        dtype=name,
        kv_dtype=name,
        page_size=settings.cache.page_size,
        num_q_heads=len(q_heads),
        num_kv_heads=len(kv_heads),
        head_dim=config.head_dim,
        sliding_window=any(window is not None for window in config.sliding_windows),
        num_experts=config.moe.num_experts if config.moe else 0,
        tensor_parallel_size=communicator.size,
    )


def _open_model(settings: Settings, host: PluginHost) -> _Model:
    if settings.model.path is None:
        raise SettingsError(
            "no model is named; give one with --model (a local folder, a .gguf file, a hub id, or "
            "package:NAME)"
        )
    path = host.resolve_checkpoint(settings.model.path, settings.model.cache_dir)
    checkpoint = open_checkpoint(path, settings.model.load_format)
    record = host.model_for(checkpoint.architectures)
    config: ModelConfig = _lazy(record.config_reader)(checkpoint.hf_config)
    return _Model(checkpoint, config, record)


def _lazy(reference: str) -> Any:
    """Import what ``"module:name"`` means."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _max_seq_len(settings: Settings, config: ModelConfig) -> int:
    wanted = settings.model.max_seq_len
    if wanted is None:
        return config.max_position
    if wanted > config.max_position:
        raise SettingsError(
            f"model.max_seq_len={wanted} is beyond the {config.max_position} positions that "
            f"{config.architecture} was made for; lower it, or leave it out"
        )
    return wanted


def _create_pool(
    settings: Settings,
    host: PluginHost,
    config: ModelConfig,
    query: BackendQuery,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[KVCachePool, tuple[Decision, ...]]:
    spec = KVPoolSpec(
        num_layers=config.num_layers,
        num_kv_heads=query.num_kv_heads,
        head_dim=config.head_dim,
        page_size=query.page_size,
        dtype=dtype,
        device=device,
    )
    chosen = select_kv_pool(host, query, settings.cache.pool, settings.backend_options)
    return chosen.record.create(spec, chosen.settings), chosen.table


def _create_attention(
    settings: Settings,
    config: ModelConfig,
    pool: KVCachePool,
    chosen: AttentionSelection,
    max_seq_len: int,
) -> AttentionBackend:
    context = AttentionContext(
        device=pool.spec.device,
        dtype=pool.spec.dtype,
        num_q_heads=config.num_q_heads,
        num_kv_heads=pool.spec.num_kv_heads,
        head_dim=config.head_dim,
        num_layers=config.num_layers,
        page_size=pool.spec.page_size,
        kv_pool=pool,
        max_running_requests=settings.scheduler.max_running_requests,
        max_seq_len=max_seq_len,
    )
    prefill = chosen.prefill.create(context, chosen.prefill_settings)
    if chosen.decode is chosen.prefill:
        return prefill
    return HybridBackend(prefill, chosen.decode.create(context, chosen.decode_settings))


def _create_moe(
    settings: Settings,
    host: PluginHost,
    config: ModelConfig,
    query: BackendQuery,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[MoeBackend | None, tuple[Decision, ...]]:
    if config.moe is None:
        return None, ()
    chosen = select_moe(host, query, settings.moe.backend, settings.backend_options)
    scheduler = settings.scheduler
    context = MoeContext(
        device=device,
        dtype=dtype,
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe.intermediate_size // query.tensor_parallel_size,
        activation=config.activation,
        max_num_tokens=scheduler.max_prefill_tokens + scheduler.max_running_requests,
    )
    return chosen.record.create(context, chosen.settings), chosen.table


def _build_model(
    settings: Settings, source: _Model, context: BuildContext, *, progress: bool
) -> BaseLLMModel:
    create: Callable[[ModelConfig, BuildContext], BaseLLMModel] = _lazy(source.record.model)
    model = create(source.config, context)
    if settings.model.load_format == "dummy":
        fill_dummy(model, settings.engine.seed)
    else:
        load_weights(model, source.checkpoint, progress=progress)
    return model


def _plan_pool(
    settings: Settings, model: BaseLLMModel, pool: KVCachePool, max_seq_len: int
) -> MemoryPlan:
    spec, cache = pool.spec, settings.cache
    plan = plan_memory(
        measure(spec.device),
        fraction=settings.engine.memory_fraction,
        weights=sum(weight.tensor.nbytes for weight in model.weights()),
        bytes_per_page=type(pool).bytes_per_page(spec),
        page_size=spec.page_size,
        num_pages=cache.num_pages,
        max_useful_tokens=max_seq_len * settings.scheduler.max_running_requests,
        in_main_memory=spec.device.type == "cpu",
    )
    wanted = settings.model.max_seq_len
    if wanted is not None and plan.num_pages * spec.page_size + 1 < wanted:
        raise SettingsError(
            f"model.max_seq_len={wanted} needs {-(-wanted // spec.page_size)} pages, but the KV "
            f"pool has {plan.num_pages} of {spec.page_size} tokens; lower model.max_seq_len, or "
            "raise cache.num_pages or engine.memory_fraction"
        )
    return plan


def _engine_info(
    settings: Settings,
    source: _Model,
    plan: MemoryPlan,
    query: BackendQuery,
    max_seq_len: int,
    chosen: AttentionSelection,
) -> EngineInfo:
    in_pool = plan.num_pages * plan.page_size + 1
    if in_pool < max_seq_len:
        logger.warning(
            "requests are limited to %d tokens: the KV pool holds no more, although the model "
            "allows %d (cache.num_pages, engine.memory_fraction)",
            in_pool,
            max_seq_len,
        )
    vocab_size = source.config.vocab_size
    eos = tuple(source.checkpoint.eos_token_ids)
    if any(not 0 <= token < vocab_size for token in eos):
        raise ModelLoadError(
            f"{source.checkpoint.path} lists the end-of-sequence ids {eos}, which do not all lie "
            f"in its vocabulary of {vocab_size} tokens; mend generation_config.json"
        )
    on_cpu = query.device == "cpu"
    return EngineInfo(
        architecture=source.config.architecture,
        device=query.device,
        dtype=query.dtype,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        max_seq_len=min(max_seq_len, in_pool),
        max_running_requests=settings.scheduler.max_running_requests,
        page_size=plan.page_size,
        num_pages=plan.num_pages,
        # One pass reads the weights once; on a GPU decode rows replay a graph of their own.
        mixed_launches=on_cpu and chosen.prefill.capabilities.mixed_batches,
        asynchronous=not on_cpu,
    )


def _on(choice: str, *, auto: bool, on: str = "on") -> bool:
    return auto if choice == "auto" else choice == on
