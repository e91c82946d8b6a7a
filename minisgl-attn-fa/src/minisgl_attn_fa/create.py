"""Makes the backend: decides on a version, imports it, lets it compile what it will need.

The one module that imports FlashAttention. Nothing is compiled after it has returned.
"""

import inspect
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from minisgl.attention import AttentionContext, AttentionLayerSpec
from minisgl.errors import UnsupportedBackendError
from minisgl.kernel.jit import cache_folder
from minisgl.plugins import BackendQuery
from minisgl_attn_fa.backend import FaBackend
from minisgl_attn_fa.edges import all_reasons, describe
from minisgl_attn_fa.fa4 import DIRECT, MOST_ROWS, FlashAttention4, Internals
from minisgl_attn_fa.installed import RELEASES, VersionName, installed_version
from minisgl_attn_fa.kernels import FlashAttention2, FlashAttention3, Kernel, Launch
from minisgl_attn_fa.settings import FaSettings

logger = logging.getLogger(__name__)

_MANY_TOKENS = 256
"""Of one row; on Blackwell, version 4 has other kernels for less than two tiles of 128 queries."""


def create_backend(context: AttentionContext, settings: FaSettings) -> FaBackend:
    """Return the backend, with every kernel that it will need compiled.

    Raises:
        UnsupportedBackendError: the version that the settings name, or with ``auto`` every one,
            cannot run here.
    """
    capability = torch.cuda.get_device_capability(context.device)
    name = choose_version(settings, query_of(context, capability))
    began = time.perf_counter()
    with torch.cuda.device(context.device):
        kernel = load(name, capability)
        for sample in samples(context):
            prepare(kernel, sample)
        torch.cuda.synchronize()
    logger.info(
        "%s %s: loaded, and its kernels compiled for prefill and decode, in %.1f s",
        RELEASES[name].title, installed_version(name), time.perf_counter() - began,
    )  # fmt: skip

    def event() -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    return FaBackend(context, kernel, event)


def query_of(context: AttentionContext, capability: tuple[int, int]) -> BackendQuery:
    """Return what a probe would be asked for this context."""
    return BackendQuery(
        device=context.device.type,
        compute_capability=capability,
        dtype=str(context.dtype).removeprefix("torch."),
        kv_dtype=str(context.kv_pool.spec.dtype).removeprefix("torch."),
        page_size=context.page_size,
        num_q_heads=context.num_q_heads,
        num_kv_heads=context.num_kv_heads,
        head_dim=context.head_dim,
        sliding_window=context.sliding_window,
        logit_soft_cap=context.logit_soft_cap,
    )


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


def _keep_compiled() -> None:
    """Let FlashAttention 4 keep what it compiles, for the next start; read when it is imported.

    Its own default folder lies in the one for temporary files, where anybody may leave code.
    """
    if "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" not in os.environ:
        folder = cache_folder() / "flash-attention-4"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("FlashAttention 4 compiles at every start: %s", error)
            return
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(folder)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def _load_4(capability: tuple[int, int]) -> FlashAttention4:
    _keep_compiled()
    from flash_attn.cute import interface

    varlen = _checked(
        "fa4",
        interface.flash_attn_varlen_func,
        ("cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "window_size"),
    )
    if capability[0] != 9 or installed_version("fa4") not in DIRECT:
        return FlashAttention4(varlen)
    from flash_attn.cute.utils import AuxData

    return FlashAttention4(varlen, Internals(interface, AuxData()))


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


@dataclass(frozen=True, slots=True)
class Sample:
    """One launch of a kind that an engine may ask for, on random numbers.

    Attributes:
        q: ``[T, q_heads, head_dim]``.
        k, v: ``[2, page_size, kv_heads, head_dim]``.
        launch: its rows, all on page 1.
        layer: with a window or without.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    launch: Launch
    layer: AttentionLayerSpec


def samples(context: AttentionContext) -> Iterator[Sample]:
    """Yield a launch of every kind."""
    random = torch.Generator(context.device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=random, device=context.device)
        return values.to(context.dtype)

    page = (2, context.page_size, context.num_kv_heads, context.head_dim)
    k, v = numbers(*page), numbers(*page)
    for window in (None, 16) if context.sliding_window else (None,):
        layer = AttentionLayerSpec(
            index=0,
            num_q_heads=context.num_q_heads,
            num_kv_heads=context.num_kv_heads,
            head_dim=context.head_dim,
            scale=context.head_dim**-0.5,
            sliding_window=window,
        )
        for launch in _launches(context):
            q = numbers(launch.num_tokens, context.num_q_heads, context.head_dim)
            yield Sample(q, k, v, launch, layer)


def prepare(kernel: Kernel, sample: Sample) -> None:
    """Run a launch, so that whatever it needs is compiled, and learn to call that directly."""
    arguments = sample.q, sample.k, sample.v, sample.launch, sample.layer
    with torch.inference_mode(), warnings.catch_warnings():
        # Of the CuTe DSL, at every compilation, about an argument that is not used here.
        warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
        kernel.attend(*arguments)
        if isinstance(kernel, FlashAttention4):
            kernel.learn(*arguments)


def _launches(context: AttentionContext) -> list[Launch]:
    """Return decode rows, short and long prompts and, if they may come, many rows of one token."""

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=context.device)

    def first_page(num_rows: int, columns: int) -> torch.Tensor:
        return torch.ones(num_rows, columns, dtype=torch.int32, device=context.device)

    def prompts(lengths: Sequence[int]) -> Launch:
        ends = [0, *accumulate(lengths)]
        return Launch(
            num_tokens=ends[-1],
            page_table=first_page(len(lengths), -(-max(lengths) // context.page_size)),
            kv_lens=ints(lengths),
            query_ends=ints(ends),
            kv_ends=ints(ends),
            most_queries=max(lengths),
            most_keys=max(lengths),
        )

    decode = Launch(num_tokens=2, page_table=first_page(2, 1), kv_lens=ints([1, 1]), most_keys=1)
    launches = [decode, prompts([1]), prompts([1, _MANY_TOKENS])]
    if context.max_running_requests > MOST_ROWS:
        launches.append(prompts([1] * (MOST_ROWS + 1)))
    return launches
