"""From a site to an engine: one rank's, whatever the number of ranks."""

import logging
import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import chain

from minisgl.attention.split import SplitBackend
from minisgl.bootstrap.attention import choose_attention, create_attention, create_pool
from minisgl.bootstrap.experts import create_exchange, create_moe, fp8_hint, log_quantized
from minisgl.bootstrap.memory import (
    is_out_of_memory,
    make_prefill_graphs,
    make_runner,
    plan_pool,
    rehearsed,
    step_tokens,
)
from minisgl.bootstrap.site import Site
from minisgl.bootstrap.stages import Stages
from minisgl.distributed.communicator import Communicator, SingleCommunicator
from minisgl.engine.engine import Engine
from minisgl.engine.info import EngineInfo
from minisgl.engine.memory_plan import MemoryPlan
from minisgl.errors import DoesNotFitError, ModelLoadError, UnsupportedBackendError
from minisgl.kernel.jit import JitLoader
from minisgl.kernel.ops import OpTable
from minisgl.layers.context import BuildContext
from minisgl.models.config import ModelFacts
from minisgl.models.interface import BaseLLMModel
from minisgl.models.loading import fill_dummy, load_weights
from minisgl.models.progress import progress_bar
from minisgl.plugins.decisions import Decision, log_decisions
from minisgl.plugins.lazy import load_object
from minisgl.plugins.selection import explain_ops, select_ops
from minisgl.settings import Settings

logger = logging.getLogger(__name__)


def build_engine(
    site: Site, communicator: Communicator | None = None, *, progress: bool = True
) -> Engine:
    """Load a rank's part of the model onto its device and size the KV pool.

    All ranks must do this at the same time: they agree on the pool's size, and warm up together.

    Args:
        site: what ``survey`` found.
        communicator: of this rank; without one there is only this.
        progress: show progress bars.

    Raises:
        MinisglError: see ``build_scheduler``.
    """
    stages = Stages()
    communicator = communicator or SingleCommunicator()
    settings = site.settings
    pool, chosen_pool = create_pool(site)
    chosen = choose_attention(site, chosen_pool)
    mixed = chosen.prefill.capabilities.mixed_batches
    if settings.scheduler.launch == "mixed" and not mixed:
        raise UnsupportedBackendError(
            f"scheduler.launch='mixed': attention backend {chosen.prefill.name!r} takes no decode "
            "and prefill rows in one launch; set scheduler.launch to auto or split"
        )
    ops, jit = select_ops(site.host, site.query), JitLoader(site.device)
    attention = create_attention(site, pool, chosen, ops, jit)
    if site.device.type == "cuda":
        attention = SplitBackend(attention)  # for prefills that are recorded
    moe, moe_rows = create_moe(site, jit, communicator.rank)
    exchange, exchange_rows = create_exchange(site, communicator)
    tables = site.model.table, chosen.table, moe_rows, exchange_rows, chosen_pool.table
    log_decisions(chain(*tables, _op_rows(site)))
    if site.model.warning:
        logger.warning("%s", site.model.warning)
    context = BuildContext(
        device=site.device,
        dtype=site.dtype,
        communicator=communicator,
        ops=ops,
        attention=attention,
        moe=moe,
        kv_pool=pool,
        max_seq_len=site.max_seq_len,
        expert_parallel_size=site.query.expert_parallel_size,
        exchange=exchange,
        moe_weights_dtype=site.moe_weights_dtype,
    )
    stages.done("backends")
    model = _build_model(site, context, progress=progress)
    stages.done("weights")
    info = _engine_info(site, mixed=mixed, shares=attention.takes_shared_prefixes)
    with rehearsed(settings, model, context, info) as needs:
        plan = plan_pool(
            settings, model, pool, communicator, max_seq_len=site.max_seq_len, needs=needs
        )
    pool.allocate(plan.num_pages + 1)
    stages.done("trial steps")
    logger.info("memory of %s:\n%s", site.device, plan.table())
    info = _limited(info, site, plan)
    engine = Engine(model, attention, info, site.device, ops, nvtx=settings.engine.nvtx)
    _warm_up(engine, settings, model, context, stages, progress=progress)
    jit.seal()
    logger.info("%s is ready after %s", site.config.architecture, stages)
    return engine


def _op_rows(site: Site) -> list[Decision]:
    """Decisions on operations that anybody but the reference offers; the others are no choice."""
    if site.model.through_transformers:
        return []
    table = explain_ops(site.host, site.query, [entry.name for entry in fields(OpTable)])
    contested = {row.kind for row in table if row.name != "reference"}
    return [row for row in table if row.kind in contested]


def _build_model(site: Site, context: BuildContext, *, progress: bool) -> BaseLLMModel:
    create: Callable[[ModelFacts, BuildContext], BaseLLMModel]
    create = load_object(site.model.record.model)
    try:
        model = create(site.config, context)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"the weights of {site.config.architecture} in {site.query.dtype} need more memory "
            f"than {site.device} has free; take a smaller model or dtype (model.dtype"
            f"{fp8_hint(site)}), free memory there, or name another device (engine.device) "
            f"({error})"
        ) from error
    if site.settings.model.load_format == "dummy":
        fill_dummy(model, site.settings.engine.seed)
    else:
        load_weights(model, site.checkpoint, progress=progress)
    log_quantized(model)
    return model


def _warm_up(
    engine: Engine,
    settings: Settings,
    model: BaseLLMModel,
    context: BuildContext,
    stages: Stages,
    *,
    progress: bool,
) -> None:
    """Do whatever happens only the first time: nothing is compiled or recorded after this."""
    most = step_tokens(settings, context.device)
    # A GPU has kernels of their own for products of 1, up to 16, 64 and 128 rows, and of more.
    sizes = {1} if context.device.type == "cpu" else {1, 16, 64, 128, 256, most}
    for num_tokens in sorted({min(size, most) for size in sizes}):
        engine.warm_up(num_tokens)
    # Filters have kernels of their own; so have the logits of rows with controls, in float32.
    for num_tokens in sorted({min(size, most) for size in sizes & {1, 16}}):
        for filtered, controlled in ((True, False), (False, True), (True, True)):
            engine.warm_up(num_tokens, filtered=filtered, controlled=controlled)
    stages.done("warm-up")
    runner = make_runner(settings, model, context, engine)
    if runner is None:
        return
    engine.record_graphs(
        runner, lambda sizes: progress_bar(sizes, "Recording CUDA graphs", show=progress)
    )
    stages.done("decode graphs")
    prefills = make_prefill_graphs(settings, model, context, engine=engine)
    if prefills is not None:
        engine.record_prefills(
            prefills, lambda sizes: progress_bar(sizes, "Recording prefills", show=progress)
        )
    stages.done("prefill graphs")


def _engine_info(site: Site, *, mixed: bool, shares: bool) -> EngineInfo:
    """Return what is known about the engine before its pool is sized.

    Args:
        site: what ``survey`` found.
        mixed: the attention backend takes decode and prefill rows in one launch.
        shares: it takes shared prefixes.
    """
    vocab_size, eos = site.config.vocab_size, tuple(site.checkpoint.eos_token_ids)
    if any(not 0 <= token < vocab_size for token in eos):
        raise ModelLoadError(
            f"{site.checkpoint.path} lists the end-of-sequence ids {eos}, which do not all lie "
            f"in its vocabulary of {vocab_size} tokens; mend generation_config.json"
        )
    on_cpu = site.device.type == "cpu"
    launch = site.settings.scheduler.launch
    # One pass reads the weights once; on a GPU decode rows replay a graph of their own.
    together = on_cpu if launch == "auto" else launch == "mixed"
    return EngineInfo(
        architecture=site.config.architecture,
        device=str(site.device),
        dtype=site.query.dtype,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        max_seq_len=site.max_seq_len,
        max_running_requests=site.settings.scheduler.max_running_requests,
        page_size=site.query.page_size,
        num_pages=1,
        mixed_launches=mixed and together,
        asynchronous=not on_cpu,
        shared_prefix_min_tokens=_shared_prefix_min_tokens(site) if shares else None,
    )


def _shared_prefix_min_tokens(site: Site) -> int | None:
    """Return the tokens whose K and V are as large as the setting says; ``None``: never."""
    mib = site.settings.attention.shared_prefix_mib
    bytes_a_token = 2 * site.query.num_kv_heads * site.config.head_dim * site.dtype.itemsize
    return math.ceil(mib * 2**20 / bytes_a_token) if mib else None


def _limited(info: EngineInfo, site: Site, plan: MemoryPlan) -> EngineInfo:
    """Return ``info`` with the pool's size, and no request longer than the pool."""
    in_pool = plan.num_pages * plan.page_size + 1
    if in_pool < site.max_seq_len:
        logger.warning(
            "requests are limited to %d tokens: the KV pool holds no more, although the model "
            "allows %d (cache.num_pages, engine.memory_fraction)",
            in_pool,
            site.max_seq_len,
        )
    return replace(info, num_pages=plan.num_pages, max_seq_len=min(site.max_seq_len, in_pool))
