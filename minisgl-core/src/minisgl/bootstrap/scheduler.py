"""From settings and plugins to a scheduler that is ready to serve."""

from minisgl.bootstrap.engine import build_engine
from minisgl.bootstrap.grammars import build_compiler
from minisgl.bootstrap.memory import step_tokens
from minisgl.bootstrap.ranks import build_parallel_engine
from minisgl.bootstrap.survey import resolve_device, survey
from minisgl.plugins.failure import creating
from minisgl.plugins.grammar_selection import select_grammar
from minisgl.plugins.host import PluginHost, load_plugins
from minisgl.plugins.selection import select_prefix_cache
from minisgl.scheduler.interfaces import StepEngine
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.transport import Transport
from minisgl.settings import Settings


def load_host(settings: Settings) -> PluginHost:
    """Load the installed plugins as ``settings.plugins`` says."""
    return load_plugins(disabled=settings.plugins.disabled, strict=settings.plugins.strict)


def build_scheduler(
    settings: Settings,
    transport: Transport,
    host: PluginHost | None = None,
    *,
    progress: bool = True,
    max_queued_tokens: int | None = None,
) -> Scheduler:
    """Load the model and return a scheduler that is ready to serve.

    Args:
        settings: everything.
        transport: the scheduler's two ends of the wire.
        host: the loaded plugins; loaded here if not given.
        progress: show progress bars.
        max_queued_tokens: most prompt tokens that wait; requests beyond them are refused.

    Raises:
        MinisglError: whatever is wrong, by the subclass and exit code that it belongs to.
    """
    host = host or load_host(settings)
    chosen_cache = select_prefix_cache(host, settings.cache.prefix, settings.backend_options)
    grammar = select_grammar(host, settings.structured.backend, settings.backend_options)
    engine: StepEngine
    if settings.parallel.tensor_parallel_size == 1:
        engine = build_engine(survey(settings, host), progress=progress)
    else:
        engine = build_parallel_engine(settings, host, progress=progress)
    info, scheduler = engine.info, settings.scheduler
    with creating("cache.prefix", chosen_cache.choice):
        prefix_cache = chosen_cache.record.create(info.page_size, chosen_cache.settings)
    return Scheduler(
        engine,
        prefix_cache,
        transport,
        max_step_tokens=step_tokens(settings, resolve_device(settings.engine.device)),
        policy=scheduler.policy,
        order=scheduler.order,
        overlap=_on(scheduler.overlap, auto=info.asynchronous),
        mixed=info.mixed_launches,
        seed=settings.engine.seed,
        observers=host,
        compiler=build_compiler(settings, host, grammar, info),
        max_queued_tokens=max_queued_tokens,
    )


def _on(choice: str, *, auto: bool) -> bool:
    return auto if choice == "auto" else choice == "on"
