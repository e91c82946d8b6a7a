"""Tensor parallelism: one engine out of several ranks, each in a process of its own."""

import pickle
from dataclasses import dataclass

import numpy as np

from minisgl.bootstrap.engine import build_engine
from minisgl.bootstrap.site import Site
from minisgl.bootstrap.survey import survey
from minisgl.distributed.rank_group import RankGroup
from minisgl.distributed.rank_process import RankLink
from minisgl.engine.parallel import DigestKeeper, ParallelEngine
from minisgl.engine.plan_codec import PlanLayout
from minisgl.errors import EngineLostError
from minisgl.plugins.host import Fingerprint, PluginHost, load_plugins
from minisgl.processes import collector_at_rest
from minisgl.settings import Settings, configure_logging


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank is given at its start.

    Attributes:
        settings: everything, the model by its local path.
        plugins: what rank 0 has loaded.
    """

    settings: Settings
    plugins: Fingerprint


def build_parallel_engine(
    settings: Settings, host: PluginHost, *, progress: bool = True
) -> ParallelEngine:
    """Start the other ranks, build this process's engine at the same time, and return them as one.

    No rank is started for a model that cannot be served or shared out over so many.

    Raises:
        EngineLostError: a rank has ended; carries the exit code of its own error.
        MinisglError: see ``build_scheduler``.
    """
    # First: a refusal costs nothing as long as there are no other processes.
    site = survey(settings, host)
    job = RankJob(_with_local_path(settings, site), host.fingerprint())
    parallel = settings.parallel
    group = RankGroup(
        parallel.tensor_parallel_size,
        __name__,
        serve_rank.__name__,
        timeout=parallel.timeout,
        start_timeout=parallel.start_timeout,
    )
    try:
        group.begin(pickle.dumps(job))
        engine = build_engine(site, group.connect(), progress=progress)
        group.serve()
    except EngineLostError as error:
        lost = group.explain(error, "the start")
        group.close()
        raise lost from error
    except BaseException:
        group.close()
        raise
    return ParallelEngine(engine, group)


def serve_rank(link: RankLink) -> None:
    """Build this rank's engine and run the plans that rank 0 sends. Runs in a fresh process.

    Raises:
        ConnectionError: rank 0 has ended.
        Exception: whatever a step raises: with several ranks each failed step is fatal.
    """
    job: RankJob = pickle.loads(link.receive_job())  # noqa: S301  (from our own parent, by a pipe)
    level = job.settings.log.level
    # Rank 0 says it all already; this rank would say it again.
    configure_logging(level if level == "debug" else "error", f"rank {link.rank}")
    plugins = job.settings.plugins
    host = load_plugins(disabled=plugins.disabled, strict=plugins.strict)
    host.check_fingerprint(job.plugins)
    site = survey(job.settings, host)
    engine = build_engine(site, link.connect(), progress=False)
    keeper = DigestKeeper(link.progress)
    with collector_at_rest():
        for frame in link.plans():
            words = np.frombuffer(frame, dtype=np.int32)
            number = PlanLayout.of(words).number
            keeper.begin(number, words)
            keeper.finish(number, engine.forward_packed(words).tokens())


def _with_local_path(settings: Settings, site: Site) -> Settings:
    """Return settings whose model is local: a download happens once, on rank 0."""
    model = settings.model.model_copy(update={"path": str(site.checkpoint.path)})
    return settings.model_copy(update={"model": model})
