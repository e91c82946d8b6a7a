"""FlashAttention 4: kernels that the CuTe DSL compiles when a kind of launch is first met.

A kind is what ``compile_key`` in its ``interface.py`` lists. To keep them few, no longest length
is passed: that would make kinds of short and long prompts. On Hopper three are left, with and
without a window: decode rows, up to 256 other rows, and more of them.

Its function checks and computes on the host at every call, once a layer. So at the start
``prepare`` notes which compiled kernel it calls for a kind, and ``DirectKernels`` calls that
itself, with the arguments that ``_flash_attn_fwd`` passes on capability 9.x in the versions of
``DIRECT``. Each is tried and compared before it is used. More than 256 rows go in pieces of so
many, which takes no third kernel. And as nothing but a kernel is called, a later start needs no
more than that: ``kept.py``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from minisgl.attention import AttentionLayerSpec
from minisgl_attn_fa.kernels import Launch, flat

logger = logging.getLogger(__name__)

DIRECT = frozenset({"4.0.0b36"})
"""Versions whose kernels' arguments were looked up: ``call_args`` in ``interface.py``."""

MOST_ROWS = 256
"""Beyond, ``BIN_BATCH_SEARCH_THRESH``, FlashAttention 4 has another kernel, and one before it."""

MASKED_HEAD_DIMS = range(65, 97)
"""Of decode rows. Without a mask their tiles have 144 keys (``_tile_size_fwd_sm90``), which are no
whole passes of the copy of pages: on an H200, 4.0.0b36 computed NaN for 80 and 96."""

_ALIGNMENT = 16
"""Bytes, of the queries' address and strides."""

_NO_EXTRAS: Final = (None, None)
"""``AuxData()``, a named tuple of no tensors and no scalars."""

Kind = tuple[bool, bool]
"""Whether all rows decode, and whether there is a window."""


class DirectKernels:
    """Compiled kernels, called with the arguments that ``_flash_attn_fwd`` passes on 9.x.

    Args:
        kernels: by kind; whoever has the mapping may add to it.
    """

    def __init__(self, kernels: Mapping[Kind, Callable[..., Any]]) -> None:
        self._kernels = kernels

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
        kernel = self._kernels[kind_of(launch, layer)]
        if not _is_aligned(q):
            q = q.contiguous()
        out = q.new_empty(q.shape)
        if launch.query_ends is None:
            _call(kernel, (q.unsqueeze(1), k, v, out.unsqueeze(1)), launch, layer)
            return out
        for piece in _pieces(launch, launch.query_ends):
            _call(kernel, (q, k, v, out), piece, layer)
        return out


class FlashAttention4:
    """``flash_attn.cute``.

    Args:
        varlen: its ``flash_attn_varlen_func``.
        interface: the module ``flash_attn.cute.interface``, to learn how to call kernels directly,
            of a version and device for which that was looked up; ``None`` leaves it at ``varlen``.
    """

    def __init__(self, varlen: Callable[..., Any], interface: Any = None) -> None:
        self._varlen = varlen
        self._interface = interface
        self._learned: dict[Kind, Callable[..., Any]] = {}
        self._direct = DirectKernels(self._learned)
        self.objects: dict[Kind, Path] = {}
        """Files in which FlashAttention 4 keeps learned kernels, as far as it does."""

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
        if kind_of(launch, layer) in self._learned:
            return self._direct.attend(q, k, v, launch, layer)
        return self._public(q, (k, v), launch, layer)

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Launch,
        layer: AttentionLayerSpec,
    ) -> None:
        """Compile what a launch needs, and note its kernel, unless a try gives anything else.

        Args:
            q: random queries.
            k: a random pool.
            v: the same.
            launch: any; the first one of a kind has up to ``MOST_ROWS`` rows.
            layer: with a window or without.
        """
        if self._interface is None or _many_rows(launch):
            self.attend(q, k, v, launch, layer)
            return
        with _used_kernels(self._interface) as used:
            expected = self._public(q, (k, v), launch, layer)
        kind = kind_of(launch, layer)
        if len(used) == 1:
            object_file, kernel = used[0]
            found = DirectKernels({kind: kernel}).attend(q, k, v, launch, layer)
            if torch.equal(found, expected):
                self._learned[kind] = kernel
                if object_file is not None:
                    self.objects[kind] = object_file
                return
        self._learned.pop(kind, None)
        self.objects.pop(kind, None)
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


def kind_of(launch: Launch, layer: AttentionLayerSpec) -> Kind:
    """Return the kind of a launch."""
    return launch.query_ends is None, layer.sliding_window is not None


def _many_rows(launch: Launch) -> bool:
    """Whether FlashAttention 4 itself would have another kernel for so many rows."""
    return launch.query_ends is not None and len(launch.kv_lens) > MOST_ROWS


def _pieces(launch: Launch, query_ends: torch.Tensor) -> Iterator[Launch]:
    """Yield a launch; one of many rows in parts, each of other rows of the same queries."""
    if not _many_rows(launch):
        yield launch
        return
    for first in range(0, len(launch.kv_lens), MOST_ROWS):
        # Where a row's queries are is counted from the first query of all, in every piece.
        yield replace(
            launch,
            page_table=launch.page_table[first : first + MOST_ROWS],
            kv_lens=launch.kv_lens[first : first + MOST_ROWS],
            query_ends=query_ends[first : first + MOST_ROWS + 1],
        )


def _call(
    kernel: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    launch: Launch,
    layer: AttentionLayerSpec,
) -> None:
    """Launch a kernel; ``tensors`` are queries, K, V and where to write."""
    window = layer.sliding_window
    left, right = (None, None) if window is None else (window - 1, 0)
    kernel(
        *tensors,
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
        _NO_EXTRAS,
        None,  # no sums of tiles: those of many rows
        None,
    )


@contextmanager
def _used_kernels(interface: Any) -> Iterator[list[tuple[Path | None, Callable[..., Any]]]]:
    """Yield a list of the compiled kernels that the interface calls meanwhile.

    Beside each stands the object file in which FlashAttention 4 keeps it; ``None`` if it does not.
    """
    function = interface._flash_attn_fwd  # noqa: SLF001 - bound to the versions of DIRECT
    cache, used = function.compile_cache, []

    class Noting:
        def __contains__(self, key: object) -> bool:
            return key in cache

        def __getitem__(self, key: object) -> Any:
            used.append((_object_file(cache, key), cache[key]))
            return used[-1][1]

        def __setitem__(self, key: object, kernel: Any) -> None:
            cache[key] = kernel

    function.compile_cache = Noting()
    try:
        yield used
    finally:
        function.compile_cache = cache


def _object_file(cache: Any, key: object) -> Path | None:
    """Return where ``JITPersistentCache`` keeps a kernel, as in its ``_try_export_to_storage``."""
    folder = getattr(cache, "cache_path", None)
    if folder is None:
        return None
    return Path(folder) / f"{cache._key_to_hash(key)}.o"  # noqa: SLF001 - bound as above


def _is_aligned(q: torch.Tensor) -> bool:
    """Whether the kernels can read queries where they lie."""
    elements = _ALIGNMENT // q.element_size()
    return (
        q.stride(2) == 1
        and q.stride(1) % elements == 0
        and q.stride(0) % elements == 0
        and q.data_ptr() % _ALIGNMENT == 0
    )
