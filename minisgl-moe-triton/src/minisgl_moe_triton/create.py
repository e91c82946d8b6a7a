"""Makes the backend: finds its launches, and compiles all of them before it serves."""

import logging
from collections.abc import Sequence

import torch
import triton
from triton.errors import TritonError

from minisgl.errors import SettingsError
from minisgl.moe import ExpertScales, MoeContext
from minisgl_moe_triton.backend import TritonMoeBackend, run_launch
from minisgl_moe_triton.configs import (
    Grouped,
    Key,
    Launch,
    find_tuned,
    rule_of_thumb,
    user_folder,
)
from minisgl_moe_triton.kernels.routing import SORT_SIZES, Routed, route, sort_by_expert
from minisgl_moe_triton.settings import TritonMoeSettings

logger = logging.getLogger(__name__)


def create_backend(context: MoeContext, settings: TritonMoeSettings) -> TritonMoeBackend:
    """Return the backend with tuned launches, or with a warning and a rule of thumb.

    Raises:
        SettingsError: a tuned file that is none, or whose launches cannot run here.
    """
    key, folder = key_of(context), settings.tuned_folder
    tuned = find_tuned(key, folder)
    if folder is not None and not folder.is_dir():
        logger.warning(
            "backend_options.triton.tuned_folder=%r is no folder that is there: no tuned MoE "
            "launches come from it", str(folder),
        )  # fmt: skip
    if tuned is None:
        logger.warning(
            "No tuned MoE launches for %d experts of %d inner and %d hidden elements in %s on %s "
            "with Triton %s: going by a rule of thumb. To measure them: minisgl tune moe "
            "--model MODEL", key.experts, key.inner, key.hidden, key.dtype, key.device, key.triton,
        )  # fmt: skip
    if tuned is None:
        launches = rule_of_thumb(key, context.top_k, shared_memory(context.device))
    else:
        launches = tuned.launches
    try:
        compile_launches(context, launches)
    except TritonError as error:
        if tuned is None:
            raise
        raise SettingsError(
            f"tuned MoE launches of {key.file_name} cannot run here ({error}). Delete it, if it "
            f"lies in {str(folder or user_folder())!r}, or write it there: minisgl tune moe "
            "--model MODEL"
        ) from error
    return TritonMoeBackend(context, launches)


def key_of(context: MoeContext) -> Key:
    """Return what the tuned file of these layers is named by."""
    on_card = context.device.type == "cuda"
    return Key(
        experts=len(context.local_experts),
        inner=context.intermediate_size,
        hidden=context.hidden_size,
        dtype=str(context.weights_dtype or context.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(context.device) if on_card else context.device.type,
        triton=".".join(triton.__version__.split(".")[:2]),
    )


def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a program can have."""
    if device.type != "cuda":
        return 48 * 1024
    properties = torch.cuda.get_device_properties(device)
    usual = properties.shared_memory_per_block
    return int(getattr(properties, "shared_memory_per_block_optin", usual))  # torch has no type


def compile_launches(context: MoeContext, launches: Sequence[Launch]) -> None:
    """Run each launch that may be needed once, with tokens that choose no expert.

    The kernels end before they read a weight, so an empty tensor stands for those.
    """
    device, dtype = context.device, context.dtype
    needed: dict[Launch, None] = {}
    for launch in launches:
        needed[launch.model_copy(update={"tokens": 1})] = None
        if launch.tokens >= context.max_num_tokens:
            break
    held, inner, hidden_size = (
        len(context.local_experts), context.intermediate_size, context.hidden_size,
    )  # fmt: skip
    stand_in = torch.empty(16, dtype=context.weights_dtype or dtype, device=device)[:1]
    gate_up = stand_in.expand(held, 2 * inner, hidden_size)
    down = stand_in.expand(held, hidden_size, inner)
    scales = None
    if context.weights_dtype is not None:
        scale = torch.empty(16, device=device)[:1]
        scales = ExpertScales(scale.expand(held, 2 * inner), scale.expand(held, hidden_size))
    hidden = torch.zeros(1, hidden_size, dtype=dtype, device=device)
    logits = torch.zeros(1, context.num_experts, dtype=dtype, device=device)
    for renormalize in (True, False):
        weights, _ = route(logits, context.top_k, renormalize=renormalize)
    nobody = Routed(torch.full_like(weights, -1, dtype=torch.int32), weights)
    for launch in needed:
        gelu = context.activation == "gelu"
        run_launch(hidden, nobody, gate_up, down, launch, gelu=gelu, scales=scales)
    if not any(isinstance(launch, Grouped) for launch in needed):
        return
    most = context.max_num_tokens * context.top_k
    for size in SORT_SIZES:
        nowhere = torch.full((min(size, most), 1), -1, dtype=torch.int32, device=device)
        sort_by_expert(Routed(nowhere, weights), held, 16)
