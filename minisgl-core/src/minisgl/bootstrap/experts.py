"""From settings to what runs a model's experts: the MoE backend, and the exchange between ranks."""

import logging

from minisgl.bootstrap.memory import step_tokens
from minisgl.bootstrap.site import Site
from minisgl.distributed.communicator import Communicator
from minisgl.errors import SettingsError
from minisgl.kernel.jit import JitLoader
from minisgl.layers.base import Layer, shard_size
from minisgl.models.config import ModelConfig, ModelFacts, MoeConfig
from minisgl.moe.exchange import ExchangeContext, ExpertExchange
from minisgl.moe.interface import MoeBackend, MoeContext
from minisgl.moe.placement import ExpertPlacement
from minisgl.plugins.capabilities import WEIGHTS_DTYPES
from minisgl.plugins.decisions import Decision
from minisgl.plugins.failure import checked, creating
from minisgl.plugins.selection import AUTO, select_exchange, select_moe
from minisgl.settings import Settings

logger = logging.getLogger(__name__)


def check_expert_parallel(settings: Settings, config: ModelFacts) -> None:
    """Check that the experts of a model can be spread as the settings say.

    Raises:
        SettingsError: they cannot; says which sizes can be.
    """
    size, num_ranks = settings.parallel.expert_parallel_size, settings.parallel.tensor_parallel_size
    given = f"parallel.expert_parallel_size={size}"
    if size == 1:
        if settings.moe.exchange != AUTO:
            raise SettingsError(
                f"moe.exchange={settings.moe.exchange!r} has nothing to do, because {given}: every "
                "rank has a part of all experts; raise that, or leave moe.exchange at auto"
            )
        return
    moe = _experts_of(config)
    if moe is None:
        raise SettingsError(f"{given}: {config.architecture} has no routed experts; set it to 1")
    if size > num_ranks:
        raise SettingsError(
            f"{given} is more than parallel.tensor_parallel_size={num_ranks}: experts are spread "
            f"over its ranks; set that to {size} or a multiple of it"
        )
    allowed = [
        number
        for number in range(1, num_ranks + 1)
        if num_ranks % number == 0 and moe.num_experts % number == 0
    ]
    if size not in allowed:
        raise SettingsError(
            f"{given} does not divide parallel.tensor_parallel_size={num_ranks} and this model's "
            f"{moe.num_experts} experts; use one of {allowed}"
        )


def moe_weights_dtype(settings: Settings, config: ModelFacts) -> str | None:
    """Return the dtype that experts are quantized to, or ``None`` if they stay as all weights.

    Raises:
        SettingsError: ``moe.weights_dtype`` is about experts, and the model has none.
    """
    lack = None if _experts_of(config) is not None else lack_of_experts(config)
    return weights_dtype_of(settings, lack)


def lack_of_experts(config: ModelFacts) -> str:
    """Say why a model has no routed experts that an MoE backend could run."""
    if isinstance(config, ModelConfig):
        return f"{config.architecture} has none"
    return (
        f"{config.architecture} runs by transformers' own code, or a plugin's, which keeps what "
        "experts there are to itself"
    )


def weights_dtype_of(settings: Settings, lack: str | None = None) -> str | None:
    """Return the same where it is known that there are experts, or why there are none: ``lack``.

    Raises:
        SettingsError: see ``moe_weights_dtype``.
    """
    wanted = settings.moe.weights_dtype
    if wanted == AUTO:
        return None
    if lack is not None:
        raise SettingsError(
            f"moe.weights_dtype={wanted!r} is about routed experts: {lack}; leave it at auto"
        )
    return WEIGHTS_DTYPES[wanted]


def create_moe(
    site: Site, jit: JitLoader, rank: int
) -> tuple[MoeBackend | None, tuple[Decision, ...]]:
    """Create the MoE backend that the settings choose for a rank; ``None`` for a dense model.

    Raises:
        MinisglError: it cannot be chosen, or not be created.
    """
    settings = site.settings
    context = moe_context(site, jit, rank)
    if context is None:
        if settings.moe.backend != AUTO:
            site.host.moe.get(settings.moe.backend)  # nothing runs it, but a typo must show
            if rank == 0:
                logger.warning(
                    "moe.backend=%r runs nothing here: %s; leave it at auto",
                    settings.moe.backend, lack_of_experts(site.config),
                )  # fmt: skip
        return None, ()
    chosen = select_moe(site.host, site.query, settings.moe.backend, settings.backend_options)
    with creating("moe", chosen.choice):
        backend = checked(chosen.record.create(context, chosen.settings), MoeBackend)
    return backend, chosen.table


def moe_context(site: Site, jit: JitLoader, rank: int = 0) -> MoeContext | None:
    """Return what MoE backends of a rank are created with, or ``None`` for a dense model."""
    config = site.config
    moe = _experts_of(config)
    if moe is None or not isinstance(config, ModelConfig):
        return None
    placement = _placement(site, moe)
    return MoeContext(
        device=site.device,
        dtype=site.dtype,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=shard_size(moe.intermediate_size, placement.ranks_per_group),
        activation=config.activation,
        max_num_tokens=_most_tokens(site),
        held_experts=placement.experts_of(rank),
        weights_dtype=site.moe_weights_dtype,
        jit=jit,
    )


def create_exchange(
    site: Site, communicator: Communicator
) -> tuple[ExpertExchange | None, tuple[Decision, ...]]:
    """Create the exchange that the settings choose; ``None`` if all ranks share all experts.

    Raises:
        MinisglError: it cannot be chosen, or not be created.
    """
    settings, config = site.settings, site.config
    moe = _experts_of(config)
    if moe is None or not isinstance(config, ModelConfig) or site.query.expert_parallel_size == 1:
        return None, ()
    chosen = select_exchange(site.host, site.query, settings.moe.exchange, settings.backend_options)
    context = ExchangeContext(
        communicator=communicator,
        placement=_placement(site, moe),
        device=site.device,
        dtype=site.dtype,
        top_k=moe.top_k,
        hidden_size=config.hidden_size,
        max_num_tokens=_most_tokens(site),
    )
    with creating("moe.exchange", chosen.choice):
        exchange = checked(chosen.record.create(context, chosen.settings), ExpertExchange)
    return exchange, chosen.table


def _experts_of(config: ModelFacts) -> MoeConfig | None:
    return config.moe if isinstance(config, ModelConfig) else None


def _placement(site: Site, moe: MoeConfig) -> ExpertPlacement:
    return ExpertPlacement(moe.num_experts, site.num_ranks, site.query.expert_parallel_size)


def _most_tokens(site: Site) -> int:
    settings = site.settings
    return step_tokens(settings, site.device) + settings.scheduler.max_running_requests


def fp8_hint(site: Site) -> str:
    """Return the setting that halves the memory of experts, if there are some to halve."""
    halves = _experts_of(site.config) is not None and site.query.moe_weights_dtype is None
    return ", of experts moe.weights_dtype" if halves else ""


def log_quantized(model: Layer) -> None:
    """Say how much memory quantized weights take, and what they would take otherwise."""
    quantized = [weight for weight in model.weights() if weight.scale is not None]
    if not quantized:
        return
    before = sum(weight.tensor.numel() * weight.dtype.itemsize for weight in quantized)
    logger.info(
        "experts are held in %s with a scale for each output channel: %.2f GiB, which would be %.2f"
        " GiB in %s; other weights stay as they are",
        str(quantized[0].tensor.dtype).removeprefix("torch."),
        sum(weight.nbytes for weight in quantized) / 2**30,
        before / 2**30,
        str(quantized[0].dtype).removeprefix("torch."),
    )
