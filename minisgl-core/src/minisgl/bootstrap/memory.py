"""What fits onto the device: everything but the KV pool is run once and measured, the rest is pool.

On a GPU the largest prefill and the largest decode graph run before the pool is sized, over two
pages: so activations, workspaces of backends and the memory of graphs are known, not guessed.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from minisgl.distributed.communicator import Communicator
from minisgl.engine.control_state import control_bytes
from minisgl.engine.engine import Engine
from minisgl.engine.graph_runner import GraphRunner, graph_sizes, shared_sizes
from minisgl.engine.info import EngineInfo
from minisgl.engine.memory_plan import MemoryPlan, Needs, measure, plan_memory
from minisgl.engine.prefill_graphs import PrefillGraphs, prefill_sizes
from minisgl.errors import DoesNotFitError
from minisgl.kernel import rows
from minisgl.kvcache.interface import KVCachePool
from minisgl.layers.context import BuildContext
from minisgl.models.interface import BaseLLMModel
from minisgl.settings import Settings

logger = logging.getLogger(__name__)

_STEP_TOKENS_ON_CPU, _STEP_TOKENS_ON_GPU = 2048, 8192
"""Token budgets of a step where none is set: what keeps the device busy, and no more."""


_MOST_GRAPH_TOKENS = 1024
"""Of a prefill that is recorded where no setting says it: padding then costs more than launches."""

_LEAST_OVERHANG = 1.2
"""A prefill that ends later than this many times its launching is the device's to hurry."""


def plan_pool(
    settings: Settings,
    model: BaseLLMModel,
    pool: KVCachePool,
    communicator: Communicator,
    *,
    max_seq_len: int,
    needs: Needs,
) -> MemoryPlan:
    """Decide how many pages the pool gets; all ranks agree on the smallest number.

    Args:
        settings: everything.
        model: loaded.
        pool: not yet sized.
        communicator: of this rank.
        max_seq_len: most tokens of one sequence.
        needs: what steps take besides the pool.

    Raises:
        DoesNotFitError: there is no room, or not for one sequence of ``model.max_seq_len``.
    """
    spec, on_cpu = pool.spec, pool.spec.device.type == "cpu"
    # Nobody measures what is free while another rank still loads.
    smallest(communicator, 0)
    plan = plan_memory(
        measure(spec.device),
        fraction=settings.engine.memory_fraction,
        weights=sum(weight.nbytes for weight in model.weights()),
        needs=needs,
        bytes_per_page=type(pool).bytes_per_page(spec),
        page_size=spec.page_size,
        num_pages=settings.cache.num_pages,
        max_useful_tokens=max_seq_len * settings.scheduler.max_running_requests,
        in_main_memory=on_cpu,
        num_sharers=communicator.size if on_cpu else 1,
    )
    plan = replace(plan, num_pages=smallest(communicator, plan.num_pages))
    wanted = settings.model.max_seq_len
    if wanted is not None and plan.num_pages * spec.page_size + 1 < wanted:
        raise DoesNotFitError(
            f"model.max_seq_len={wanted} needs {-(-wanted // spec.page_size)} pages, but the KV "
            f"pool has {plan.num_pages} of {spec.page_size} tokens; lower model.max_seq_len, or "
            "raise cache.num_pages or engine.memory_fraction"
        )
    return plan


def step_tokens(settings: Settings, device: torch.device) -> int:
    """Return the token budget of a step: what the settings say, or what suits the device."""
    default = _STEP_TOKENS_ON_CPU if device.type == "cpu" else _STEP_TOKENS_ON_GPU
    return settings.scheduler.max_prefill_tokens or default


def smallest(communicator: Communicator, number: int) -> int:
    """Return the smallest of the ranks' numbers, once all of them are here."""
    return int(communicator.all_gather(torch.tensor([number]), dim=0).min())


@contextlib.contextmanager
def rehearsed(
    settings: Settings, model: BaseLLMModel, context: BuildContext, info: EngineInfo
) -> Iterator[Needs]:
    """Run the largest steps over a pool of two pages; yields what they take besides weights.

    What stays allocated between steps (row state, workspaces, the graphs' memory) is held while the
    caller measures the device; what a step only takes for a while is in the result.

    Args:
        settings: everything.
        model: loaded.
        context: the model's surroundings.
        info: the engine's facts, as far as they are known.

    Raises:
        DoesNotFitError: a step of the allowed size runs out of memory.
    """
    controls = control_bytes(info.max_running_requests, info.vocab_size, len(info.eos_token_ids))
    if context.device.type == "cpu":
        yield Needs(controls=controls)
        return
    num_tokens = step_tokens(settings, context.device)
    try:
        context.kv_pool.allocate(2)
        engine = Engine(model, context.attention, info, context.device, context.ops)
        torch.cuda.reset_peak_memory_stats(context.device)
        before = torch.cuda.memory_allocated(context.device)
        for controlled in (False, True):
            engine.warm_up(num_tokens, filtered=True, controlled=controlled)
        activations = torch.cuda.max_memory_allocated(context.device) - before
        torch.cuda.empty_cache()
        free = measure(context.device).free
        runner = make_runner(settings, model, context, engine, rehearsal=True)
        prefills = None
        if runner is not None:
            prefills = make_prefill_graphs(settings, model, context, largest_only=True)
            with torch.inference_mode(), engine.on_stream():
                runner.record_largest()
                if prefills is not None:
                    prefills.record(lambda sizes: sizes)
            torch.cuda.synchronize(context.device)
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"a step of scheduler.max_prefill_tokens={num_tokens} tokens and "
            f"scheduler.max_running_requests={info.max_running_requests} requests needs more "
            f"memory than the weights leave on {context.device}; lower one of them, or "
            f"engine.cuda_graph_max_rows ({error})"
        ) from error
    graphs = free - measure(context.device).free
    yield Needs(activations=activations, graphs=graphs, controls=controls)
    if runner is not None:
        runner.forget()
    if prefills is not None:
        prefills.forget()
    del engine, runner, prefills
    torch.cuda.empty_cache()


def make_runner(
    settings: Settings,
    model: BaseLLMModel,
    context: BuildContext,
    engine: Engine,
    *,
    rehearsal: bool = False,
) -> GraphRunner | None:
    """Return what records this engine's decode graphs, or ``None`` if nothing can or should.

    If nothing can, the log says why; not in a ``rehearsal``, after which it would say so again.
    """
    wanted = settings.engine.cuda_graph_max_rows
    max_rows = engine.info.max_running_requests
    max_rows = max_rows if wanted is None else min(wanted, max_rows)
    if context.device.type != "cuda" or not max_rows:
        return None
    reason = _no_graphs(model, context)
    if reason is not None:
        # Whoever runs through transformers' code has been told, or has asked for it.
        level = logging.INFO if _through_transformers(model) else logging.WARNING
        if not rehearsal:
            logger.log(level, "decode runs without CUDA graphs, which is slower: %s", reason)
        return None
    sizes = graph_sizes(max_rows)
    shared = shared_sizes(sizes) if engine.info.shared_prefix_min_tokens is not None else []
    return GraphRunner(model, context.attention, engine.state, sizes, shared_sizes=shared)


def make_prefill_graphs(
    settings: Settings,
    model: BaseLLMModel,
    context: BuildContext,
    *,
    engine: Engine | None = None,
    largest_only: bool = False,
) -> PrefillGraphs | None:
    """Return what records prefills of few tokens, for whom decode graphs can be recorded.

    Args:
        settings: everything.
        model: loaded.
        context: the model's surroundings.
        engine: measures up to which size graphs pay, unless the settings say it.
        largest_only: only the largest size, to see how much memory it takes.
    """
    wanted = settings.engine.prefill_graph_max_tokens
    most = step_tokens(settings, context.device)
    most = min(_MOST_GRAPH_TOKENS, most) if wanted is None else min(wanted, most)
    if context.device.type != "cuda" or not most:
        return None
    sizes = [most] if largest_only else prefill_sizes(most)
    if wanted is None and engine is not None:
        while sizes and not _launching_takes_longer(engine, sizes[-1]):
            sizes.pop()
    if not sizes:
        return None
    return PrefillGraphs(model, context.attention, sizes, context.device)


def _launching_takes_longer(engine: Engine, num_tokens: int) -> bool:
    """Whether the host is still launching a prefill when the device has computed most of it."""
    rows = -(-num_tokens // engine.info.max_seq_len)
    engine.warm_up(num_tokens, most_rows=rows)
    prefilled = min(
        (engine.warm_up(num_tokens, most_rows=rows) for _ in range(3)), key=lambda one: one.done
    )
    return prefilled.done < prefilled.launched * _LEAST_OVERHANG


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether an allocation failed; that of main memory has no exception of its own."""
    kinds = torch.OutOfMemoryError | MemoryError
    return isinstance(error, kinds) or "allocate memory" in str(error)


def _no_graphs(model: BaseLLMModel, context: BuildContext) -> str | None:
    """Return why decode cannot be recorded, or ``None``."""
    if not model.supports_cuda_graphs:
        return f"{type(model).__name__} runs eagerly"
    if context.attention.cuda_graphs is None:
        return "the attention backend takes no part in them"
    if context.moe is not None and not context.moe.cuda_graphs:
        return f"{type(context.moe).__name__} chooses what it launches by the routing"
    if context.ops.apply_plan is rows.apply_plan:
        return "the operations at the head of a graph need Triton"
    return None


def _through_transformers(model: BaseLLMModel) -> bool:
    if model.supports_cuda_graphs:
        return False
    # Imported here: it brings all of transformers, which is there already if the answer is yes.
    from minisgl.models.hf.model import TransformersModel

    return isinstance(model, TransformersModel)
