"""Makes the backend: decides on a version, imports it, lets it compile what it will need.

The one module that imports FlashAttention. Nothing is compiled after it has returned. Where an
earlier start has kept the kernels, nothing is imported either.
"""

import inspect
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl.attention import AttentionContext
from minisgl.errors import UnsupportedBackendError
from minisgl.kernel.jit import cache_folder
from minisgl.plugins import BackendQuery
from minisgl.plugins.query import query_of_context
from minisgl_attn_fa import fa4
from minisgl_attn_fa.backend import FaBackend
from minisgl_attn_fa.edges import all_reasons, describe
from minisgl_attn_fa.fa4 import DIRECT, DirectKernels, FlashAttention4, Kind
from minisgl_attn_fa.installed import RELEASES, VersionName, folder_of, installed_version
from minisgl_attn_fa.kept import KeptKernels, NotKeptError, facts_of
from minisgl_attn_fa.kernels import FlashAttention2, FlashAttention3, Kernel
from minisgl_attn_fa.samples import Sample, largest_error, most_error, samples
from minisgl_attn_fa.settings import FaSettings

logger = logging.getLogger(__name__)

_ENABLED, _FOLDER = (f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR"))
"""What FlashAttention 4 reads when it is imported: whether it keeps kernels, and where."""


def create_backend(context: AttentionContext, settings: FaSettings) -> FaBackend:
    """Return the backend, with every kernel that it will need compiled.

    Raises:
        UnsupportedBackendError: the version that the settings name, or with ``auto`` every one,
            cannot run here.
    """
    capability = torch.cuda.get_device_capability(context.device)
    name = choose_version(settings, query_of_context(context, capability))
    began = time.perf_counter()
    with torch.cuda.device(context.device):
        kernel, how = kernel_of(name, context, capability)
        torch.cuda.synchronize()
    logger.info(
        "%s %s: %s, in %.1f s",
        RELEASES[name].title, installed_version(name), how, time.perf_counter() - began,
    )  # fmt: skip

    def event() -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    return FaBackend(context, kernel, event)


def choose_version(settings: FaSettings, query: BackendQuery) -> VersionName:
    """Return the version that the settings name, or the first one that can run.

    Raises:
        UnsupportedBackendError: it cannot run, or none can; says why, and what could be set.
    """
    reasons = all_reasons(query)
    usable = [name for name, reason in reasons.items() if reason is None]
    if settings.version == "auto":
        if not usable:
            raise UnsupportedBackendError(f"backend 'fa' cannot run here: {describe(reasons)}")
        return usable[0]
    if settings.version not in usable:
        out = f"auto or {' or '.join(usable)}" if usable else "nothing else, as no other can run"
        raise UnsupportedBackendError(
            f"backend_options.fa.version={settings.version!r} cannot run here: "
            f"{RELEASES[settings.version].title} {reasons[settings.version]}. Set it to {out}."
        )
    return settings.version


def kernel_of(
    name: VersionName, context: AttentionContext, capability: tuple[int, int]
) -> tuple[Kernel, str]:
    """Return a version, ready for every launch that may come, and a word on how.

    Raises:
        UnsupportedBackendError: see ``load``.
    """
    kept = None
    if name == "fa4" and _is_called_directly(capability) and (folder := keep_where()):
        kept = kept_kernels(folder, context, capability)
    if kept is not None:
        try:
            return load_kept(kept, context), "kept kernels loaded and compared"
        except NotKeptError as reason:
            logger.log(
                reason.level,
                "FlashAttention 4 is imported, which takes seconds of the start: %s", reason,
            )  # fmt: skip
    kernel = load(name, capability)
    for sample in samples(context):
        prepare(kernel, sample)
    if kept is not None and os.environ[_ENABLED] == "1":
        assert isinstance(kernel, FlashAttention4)
        _keep(kernel, kept, context)
    return kernel, "loaded, and its kernels compiled for prefill and decode"


def keep_where() -> Path | None:
    """Return where kernels of version 4 are kept for the next start, or ``None``: nowhere.

    Its own default folder lies in the one for temporary files, where anybody may leave code.
    """
    if os.environ.setdefault(_ENABLED, "1") != "1":
        return None
    return Path(os.environ.setdefault(_FOLDER, str(cache_folder() / "flash-attention-4")))


def _make_folder() -> None:
    """Make the folder, before version 4 is imported, which fails where it cannot write there."""
    folder = keep_where()
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.warning("FlashAttention 4 compiles at every start: %s", error)
        os.environ[_ENABLED] = "0"


def kept_kernels(
    folder: Path, context: AttentionContext, capability: tuple[int, int]
) -> KeptKernels:
    """Return the kernels of version 4 that are or will be kept for this context.

    What decides on them is the package and how it is called.
    """
    sources = [folder_of("fa4"), Path(str(fa4.__file__))]
    return KeptKernels(folder / "linked", facts_of(context, capability, sources))


def load_kept(kept: KeptKernels, context: AttentionContext) -> DirectKernels:
    """Return kept kernels of all kinds, each of which has computed what it should.

    Raises:
        NotKeptError: one of them is not there, or cannot be used.
    """
    kernels = DirectKernels({kind: kept.load(_name(kind)) for kind in _kinds(context)})
    for sample in samples(context):
        try:
            error = largest_error(kernels, sample)
        except (RuntimeError, TypeError, ValueError) as failure:
            raise NotKeptError(f"a kept kernel fails: {failure}") from failure
        if not error <= most_error(context.dtype):
            raise NotKeptError(f"a kept kernel computes something else, by {error:.1e}")
    return kernels


def _keep(kernel: FlashAttention4, kept: KeptKernels, context: AttentionContext) -> None:
    """Keep what was compiled, and try it as the next start will; say so if that start is slow."""
    from cutlass.cute.runtime import find_runtime_libraries

    try:
        runtimes = [Path(one) for one in find_runtime_libraries(enable_tvm_ffi=False)]
        for kind in _kinds(context):
            if kind not in kernel.objects:
                raise NotKeptError(f"FlashAttention 4 keeps no kernel for {_name(kind)}")
            kept.keep(_name(kind), kernel.objects[kind], runtimes)
        load_kept(kept, context)
    except NotKeptError as reason:
        logger.warning(
            "FlashAttention 4 is imported at the next start too, which takes seconds: %s", reason
        )


def _kinds(context: AttentionContext) -> list[Kind]:
    windows = (False, True) if context.sliding_window else (False,)
    return [(decode, window) for window in windows for decode in (True, False)]


def _name(kind: Kind) -> str:
    decode, window = kind
    return ("decode" if decode else "prefill") + ("-window" if window else "")


def load(name: VersionName, capability: tuple[int, int]) -> Kernel:
    """Import a version, for devices of a compute capability.

    Raises:
        UnsupportedBackendError: it is not the one that its distribution's version says.
    """
    if name == "fa4":
        return _load_4(capability)
    if name == "fa3":
        from flash_attn_interface import flash_attn_with_kvcache

        return FlashAttention3(
            _checked(
                name,
                flash_attn_with_kvcache,
                ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softcap"),
            )
        )
    from flash_attn import flash_attn_interface

    return FlashAttention2(
        _checked(
            name,
            flash_attn_interface.flash_attn_with_kvcache,
            ("cache_seqlens", "block_table", "window_size", "softcap"),
        ),
        _checked(
            name,
            flash_attn_interface.flash_attn_varlen_func,
            ("cu_seqlens_k", "max_seqlen_k", "block_table", "window_size", "softcap"),
        ),
    )


def _load_4(capability: tuple[int, int]) -> FlashAttention4:
    _make_folder()
    from flash_attn.cute import interface

    varlen = _checked(
        "fa4",
        interface.flash_attn_varlen_func,
        ("cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "window_size"),
    )
    return FlashAttention4(varlen, interface if _is_called_directly(capability) else None)


def _is_called_directly(capability: tuple[int, int]) -> bool:
    return capability[0] == 9 and installed_version("fa4") in DIRECT


def _checked(
    name: VersionName, function: Callable[..., Any], parameters: Sequence[str]
) -> Callable[..., Any]:
    """Return the function if it takes these parameters: 2 and 4 may overwrite one another."""
    missing = [one for one in parameters if one not in inspect.signature(function).parameters]
    if missing:
        raise UnsupportedBackendError(
            f"{RELEASES[name].title} {installed_version(name)}: {function.__module__}."
            f"{function.__qualname__} takes no {' and no '.join(missing)}, so it belongs to "
            f"another version; install {RELEASES[name].distribution} again, after the others"
        )
    return function


def prepare(kernel: Kernel, sample: Sample) -> None:
    """Run a launch, so that whatever it needs is compiled."""
    arguments = sample.q, sample.k, sample.v, sample.launch, sample.layer
    with torch.inference_mode(), warnings.catch_warnings():
        # Of the CuTe DSL, at every compilation, about an argument that is not used here.
        warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
        if isinstance(kernel, FlashAttention4):
            kernel.prepare(*arguments)
        else:
            kernel.attend(*arguments)
