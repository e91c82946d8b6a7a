"""FlashAttention 4: kernels that the CuTe DSL compiles when a kind of launch is first met.

A kind is what ``compile_key`` in its ``interface.py`` lists. To keep them few, no longest length
is passed: that would make kinds of short and long prompts. On Hopper three are left, with and
without a window: decode rows, up to 256 other rows, and more of them.

Its function checks and computes on the host at every call, once a layer. So at the start
``learn`` notes which compiled kernel it calls for a kind, and ``attend`` calls that itself, with
the arguments that ``_flash_attn_fwd`` passes on capability 9.x in the versions of ``DIRECT``.
Each is tried and compared before it is used.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention import AttentionLayerSpec
from minisgl_attn_fa.kernels import Launch, flat

logger = logging.getLogger(__name__)

DIRECT = frozenset({"4.0.0b36"})
"""Versions whose kernels' arguments were looked up: ``call_args`` in ``interface.py``."""

MOST_ROWS = 256
"""Beyond, ``BIN_BATCH_SEARCH_THRESH``, a launch is preceded by another kernel."""

MASKED_HEAD_DIMS = range(65, 97)
"""Of decode rows. Without a mask their tiles have 144 keys (``_tile_size_fwd_sm90``), which are no
whole passes of the copy of pages: on an H200, 4.0.0b36 computed NaN for 80 and 96."""

_ALIGNMENT = 16
"""Bytes, of the queries' address and strides."""

Kind = tuple[bool, bool]
"""Whether all rows decode, and whether there is a window; of up to ``MOST_ROWS`` rows otherwise."""


@dataclass(frozen=True, slots=True)
class Internals:
    """What calling its kernels directly takes of the package.

    Attributes:
        interface: the module ``flash_attn.cute.interface``.
        no_extras: ``AuxData()``.
    """

    interface: Any
    no_extras: Any


class FlashAttention4:
    """``flash_attn.cute``.

    Args:
        varlen: its ``flash_attn_varlen_func``.
        internals: to learn how to call kernels directly, of a version and device for which that
            was looked up; ``None`` leaves it at ``varlen``.
    """

    def __init__(self, varlen: Callable[..., Any], internals: Internals | None = None) -> None:
        self._varlen = varlen
        self._internals = internals
        self._learned: dict[Kind, Callable[..., Any]] = {}

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Launch,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Attend; see ``Kernel``."""
        assert layer.logit_soft_cap is None, "the cap would be compiled in, at this call"
        if _has_kind(launch):
            kernel = self._learned.get(_kind(launch, layer))
            if kernel is not None:
                return self._call(kernel, q, (k, v), launch, layer)
        return self._public(q, (k, v), launch, layer)

    def learn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Launch,
        layer: AttentionLayerSpec,
    ) -> None:
        """Note the kernel of a launch's kind, unless a try of it gives anything else.

        Args:
            q: random queries.
            k: a random pool.
            v: the same.
            launch: any.
            layer: with a window or without.
        """
        if self._internals is None or not _has_kind(launch):
            return
        with _used_kernels(self._internals.interface) as used:
            expected = self._public(q, (k, v), launch, layer)
        kind = _kind(launch, layer)
        if len(used) == 1 and torch.equal(self._call(used[0], q, (k, v), launch, layer), expected):
            self._learned[kind] = used[0]
        else:
            self._learned.pop(kind, None)
            logger.warning(
                "FlashAttention 4 is called through its own function for %s, which takes the host "
                "longer: its kernel, called directly, gave something else",
                "decode" if kind[0] else "prefill",
            )

    def _public(
        self,
        q: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        launch: Launch,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        decode, window = launch.query_ends is None, layer.sliding_window
        out, _ = self._varlen(
            q.unsqueeze(1) if decode else q,
            *pool,
            cu_seqlens_q=launch.query_ends,
            seqused_k=launch.kv_lens,
            page_table=launch.page_table,
            softmax_scale=layer.scale,
            # The one query of a decode row sees all keys. Some head dims are masked all the same.
            causal=not decode or layer.head_dim in MASKED_HEAD_DIMS,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
        return flat(out, q)

    def _call(
        self,
        kernel: Callable[..., Any],
        q: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        launch: Launch,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        assert self._internals is not None
        if not _is_aligned(q):
            q = q.contiguous()
        out = q.new_empty(q.shape)
        window = layer.sliding_window
        left, right = (None, None) if window is None else (window - 1, 0)
        queries, written = (q, out)
        if launch.query_ends is None:
            queries, written = (q.unsqueeze(1), out.unsqueeze(1))
        kernel(
            queries,
            *pool,
            written,
            None,  # no log-sums
            layer.scale,
            launch.query_ends,
            None,
            None,
            launch.kv_lens,
            launch.page_table,
            left,
            right,
            None,  # no sinks
            None,  # no sparse blocks
            self._internals.no_extras,
            None,  # no sums of tiles: those of many rows
            None,
        )
        return out


def _has_kind(launch: Launch) -> bool:
    return launch.query_ends is None or len(launch.kv_lens) <= MOST_ROWS


def _kind(launch: Launch, layer: AttentionLayerSpec) -> Kind:
    return launch.query_ends is None, layer.sliding_window is not None


@contextmanager
def _used_kernels(interface: Any) -> Iterator[list[Callable[..., Any]]]:
    """Yield a list of the compiled kernels that the interface calls meanwhile."""
    function = interface._flash_attn_fwd  # noqa: SLF001 - bound to the versions of DIRECT
    cache, used = function.compile_cache, []

    class Noting:
        def __contains__(self, key: object) -> bool:
            return key in cache

        def __getitem__(self, key: object) -> Any:
            used.append(cache[key])
            return used[-1]

        def __setitem__(self, key: object, kernel: Any) -> None:
            cache[key] = kernel

    function.compile_cache = Noting()
    try:
        yield used
    finally:
        function.compile_cache = cache


def _is_aligned(q: torch.Tensor) -> bool:
    """Whether the kernels can read queries where they lie."""
    elements = _ALIGNMENT // q.element_size()
    return (
        q.stride(2) == 1
        and q.stride(1) % elements == 0
        and q.stride(0) % elements == 0
        and q.data_ptr() % _ALIGNMENT == 0
    )
