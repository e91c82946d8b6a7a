"""Makes the backend: decides on kernels, loads or compiles them, gives them memory.

With ``trtllm_create.py`` all that imports FlashInfer. Nothing is compiled after it has returned.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from minisgl.attention import AttentionContext
from minisgl.errors import UnsupportedBackendError
from minisgl_attn_flashinfer import installed
from minisgl_attn_flashinfer.backend import FlashInferBackend, Kernels
from minisgl_attn_flashinfer.choice import DecodeKernel
from minisgl_attn_flashinfer.kernels import CudaCoreKernel, Kernel, TensorCoreKernel
from minisgl_attn_flashinfer.modules import (
    CUDA_CORE_GROUPS,
    Template,
    decode_module,
    prefill_module,
)
from minisgl_attn_flashinfer.probe import missing_modules
from minisgl_attn_flashinfer.settings import FlashInferSettings
from minisgl_attn_flashinfer.sizes import Shape, float_workspace_bytes

logger = logging.getLogger(__name__)

_OPTIONS = "backend_options.flashinfer"


class _DeviceEvent:
    """An event of a device's current stream, whichever device is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.query = self._event.query
        self.synchronize = self._event.synchronize

    def record(self) -> None:
        """Mark this place of the device's current stream."""
        self._event.record(torch.cuda.current_stream(self._device))


def create_backend(context: AttentionContext, settings: FlashInferSettings) -> FlashInferBackend:
    """Return the backend, with every kernel that it will need loaded.

    Raises:
        UnsupportedBackendError: a kernel that the settings ask for is not to be had.
    """
    reason = installed.why_unusable()
    if reason is not None:
        raise UnsupportedBackendError(f"backend 'flashinfer' {reason}")
    capability = torch.cuda.get_device_capability(context.device)
    properties = torch.cuda.get_device_properties(context.device)
    shape = Shape(
        num_q_heads=context.num_q_heads,
        num_kv_heads=context.num_kv_heads,
        head_dim=context.head_dim,
        page_size=context.page_size,
        num_sms=properties.multi_processor_count,
    )
    dtype = str(context.dtype).removeprefix("torch.")
    template = choose_prefill_template(settings, capability, dtype, context.head_dim)
    decode = choose_decode_kernels(settings, dtype, shape)
    pdl = settings.pdl and capability >= (9, 0)
    kernels = Kernels(
        prefill=_tensor_cores(template, context.dtype, shape, causal=True, pdl=pdl)
        if template is not None
        else None,
        decode={name: _decode_kernel(name, context.dtype, shape, pdl=pdl) for name in decode},
    )
    size = float_workspace_bytes(shape, prefill_fa2=template == "fa2")
    if settings.workspace_mib is not None:
        size = settings.workspace_mib * 2**20
    floats = torch.zeros(size, dtype=torch.uint8, device=context.device)
    logger.info(
        "FlashInfer %s: prefill %s, decode on %s, workspace %d MiB",
        *(installed.flashinfer_version(), template or "not served"),
        *(" and ".join(f"{name} cores" for name in decode) or "nothing", size // 2**20),
    )
    return FlashInferBackend(context, shape, kernels, floats, lambda: _DeviceEvent(context.device))


def choose_prefill_template(
    settings: FlashInferSettings, capability: tuple[int, int], dtype: str, head_dim: int
) -> Template | None:
    """Return the template of prefill, or ``None`` if there is none to be had.

    Raises:
        UnsupportedBackendError: the one that the settings name cannot run, or is not to be had.
    """
    asked = settings.prefill_template
    if asked == "fa3" and capability[0] != 9:
        raise UnsupportedBackendError(
            f"{_OPTIONS}.prefill_template='fa3' needs compute capability 9.x, found "
            f"{capability[0]}.{capability[1]}; set it to auto or fa2"
        )
    if asked != "auto":
        module = prefill_module(asked, dtype, head_dim)
        _require(module, f"prefill_template={asked!r}")
        return asked
    templates: tuple[Template, ...] = ("fa3", "fa2") if capability[0] == 9 else ("fa2",)
    for template in templates:
        lacking = installed.why_missing(prefill_module(template, dtype, head_dim))
        if lacking is None:
            return template
        module = prefill_module(template, dtype, head_dim)
        logger.warning(
            "prefill without the %s template: %s", template, missing_modules(module, lacking)
        )
    return None


def choose_decode_kernels(
    settings: FlashInferSettings, dtype: str, shape: Shape
) -> tuple[DecodeKernel, ...]:
    """Return the decode kernels to load; with ``auto`` those that are to be had.

    Raises:
        UnsupportedBackendError: the one that the settings name cannot run, or is not to be had.
    """
    asked = settings.decode_kernel
    takes_group = shape.group in CUDA_CORE_GROUPS
    if asked == "cuda" and not takes_group:
        raise UnsupportedBackendError(
            f"{_OPTIONS}.decode_kernel='cuda' takes {', '.join(map(str, CUDA_CORE_GROUPS))} query "
            f"heads per KV head, found {shape.group}; set it to auto or tensor"
        )
    modules: dict[DecodeKernel, str] = {"tensor": prefill_module("fa2", dtype, shape.head_dim)}
    if takes_group:
        modules["cuda"] = decode_module(dtype, shape.head_dim)
    if asked != "auto":
        _require(modules[asked], f"decode_kernel={asked!r}")
        return (asked,)
    return tuple(name for name, module in modules.items() if installed.why_missing(module) is None)


def _require(module: str, setting: str) -> None:
    lacking = installed.why_missing(module)
    if lacking is not None:
        raise UnsupportedBackendError(f"{_OPTIONS}.{setting}: {missing_modules(module, lacking)}")


def _decode_kernel(name: DecodeKernel, dtype: torch.dtype, shape: Shape, *, pdl: bool) -> Kernel:
    if name == "tensor":
        return _tensor_cores("fa2", dtype, shape, causal=False, pdl=pdl)
    from flashinfer.decode import get_batch_decode_module

    arguments = (dtype, dtype, dtype, torch.int32, shape.head_dim, shape.head_dim, 0, False, False)
    wanted = decode_module(str(dtype).removeprefix("torch."), shape.head_dim)
    module = load_module(wanted, lambda: get_batch_decode_module(*arguments))
    return CudaCoreKernel(module, shape, dtype, pdl=pdl)


def _tensor_cores(
    template: Template, dtype: torch.dtype, shape: Shape, *, causal: bool, pdl: bool
) -> Kernel:
    from flashinfer.prefill import get_batch_prefill_module

    # q, K and V, output, indices; head dims; no rotation, window, soft cap, float16 products.
    arguments = (dtype, dtype, dtype, torch.int32, shape.head_dim, shape.head_dim, 0)
    wanted = prefill_module(template, str(dtype).removeprefix("torch."), shape.head_dim)
    module = load_module(
        wanted, lambda: get_batch_prefill_module(template, *arguments, *(False,) * 3)
    )
    return TensorCoreKernel(module, template, shape, causal=causal, pdl=pdl)


def load_module(name: str, load: Callable[[], Any]) -> Any:
    """Load a module; say so before and after if it may have to be compiled."""
    if installed.precompiled(name):
        return load()
    logger.info("FlashInfer compiles %s, unless it did before: minutes, once a version", name)
    began = time.perf_counter()
    module = load()
    logger.info("%s is loaded after %.0f s", name, time.perf_counter() - began)
    return module
