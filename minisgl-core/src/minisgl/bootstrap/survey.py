"""Which model runs, where and in what: decided before anything is built, the same on every rank."""

import os

import torch

from minisgl.bootstrap.experts import check_expert_parallel, moe_weights_dtype
from minisgl.bootstrap.site import Site
from minisgl.errors import SettingsError
from minisgl.models.checkpoint import Checkpoint
from minisgl.models.config import ModelFacts
from minisgl.models.opening import open_checkpoint
from minisgl.plugins.host import PluginHost
from minisgl.plugins.lazy import load_object
from minisgl.plugins.model_selection import FASTER_ELSEWHERE, select_model
from minisgl.plugins.query import build_query
from minisgl.settings import Settings


def survey(settings: Settings, host: PluginHost) -> Site:
    """Find the model and decide where and in what it runs; the same on every rank.

    Raises:
        MinisglError: see ``build_scheduler``.
    """
    if settings.model.path is None:
        raise SettingsError(
            "no model is named; give one with --model (a local folder, a .gguf file, a hub id, or "
            "package:NAME)"
        )
    device = resolve_device(settings.engine.device)
    num_ranks = settings.parallel.tensor_parallel_size
    if num_ranks > 1 and device.type != "cpu":
        raise SettingsError(
            f"parallel.tensor_parallel_size={num_ranks}: several ranks run on the CPU only in this "
            f"version, not on {device}; set it to 1, or engine.device to cpu"
        )
    num_threads = settings.engine.num_threads or _share_of_threads(num_ranks)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    path = host.resolve_checkpoint(settings.model.path, settings.model.cache_dir)
    checkpoint = open_checkpoint(path, settings.model.load_format)
    model = select_model(host, checkpoint.architectures, settings.model.implementation)
    if model.through_transformers and num_ranks > 1:
        raise SettingsError(
            f"parallel.tensor_parallel_size={num_ranks}: {checkpoint.architectures[0]} runs by "
            "transformers' own code here, on one rank only; set it to 1, or use a plugin that "
            f"offers the architecture{_and_package(checkpoint)}"
        )
    config: ModelFacts = load_object(model.record.config_reader)(checkpoint.hf_config)
    check_expert_parallel(settings, config)
    dtype = resolve_dtype(settings.model.dtype, config.dtype, device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    dtype_name = str(dtype).removeprefix("torch.")
    return Site(
        settings=settings,
        host=host,
        checkpoint=checkpoint,
        model=model,
        config=config,
        device=device,
        dtype=dtype,
        max_seq_len=_max_seq_len(settings, config),
        num_ranks=num_ranks,
        query=build_query(
            config,
            device=device.type,
            compute_capability=capability,
            dtype=dtype_name,
            kv_dtype=dtype_name,
            page_size=settings.cache.page_size,
            tensor_parallel_size=num_ranks,
            expert_parallel_size=settings.parallel.expert_parallel_size,
            moe_weights_dtype=moe_weights_dtype(settings, config),
        ),
    )


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


def _and_package(checkpoint: Checkpoint) -> str:
    """Name the distribution that has the architecture, if it is known."""
    packages = [FASTER_ELSEWHERE.get(name) for name in checkpoint.architectures]
    return "".join(f": pip install {package}" for package in packages[:1] if package)


def _share_of_threads(num_ranks: int) -> int | None:
    """Return the threads of one of several ranks; ``None`` leaves a single one to torch."""
    if num_ranks == 1:
        return None
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(allowed) if allowed.isdecimal() else len(os.sched_getaffinity(0))
    return max(1, cores // num_ranks)


def _max_seq_len(settings: Settings, config: ModelFacts) -> int:
    wanted = settings.model.max_seq_len
    if wanted is None:
        return config.max_position
    if wanted > config.max_position:
        raise SettingsError(
            f"model.max_seq_len={wanted} is beyond the {config.max_position} positions that "
            f"{config.architecture} was made for; lower it, or leave it out"
        )
    return wanted
