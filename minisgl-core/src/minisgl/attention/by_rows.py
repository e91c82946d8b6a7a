"""Recorded decode launches by whichever of several backends is fastest for so many rows.

Which kernel reads K and V fastest depends on how many rows there are to share the device, so a
graph of few rows may attend through another backend than one of many. Each is timed at start-up, on
pages of the pool, for 1, 2, 4, ... rows; what is measured for so many goes for all sizes down to
the next smaller one.
"""

import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.hybrid import RoutedPlan
from minisgl.attention.interface import AttentionBackend, AttentionContext, AttentionLayerSpec

logger = logging.getLogger(__name__)

Measure = Callable[[AttentionBackend, AttentionContext, int], float | None]
"""Time of a layer's attention for so many decode rows; ``None``: it cannot be measured now."""

_LEAST_GAIN: Final = 0.05
"""Of the time; below, the backend of the highest rank stays: so noise chooses nothing."""

_TOKENS, _LEAST_TOKENS = 1024, 256
"""Of each row that is measured, if there are so many pages, and the fewest that say something."""

_LAYERS, _ROUNDS = 8, 3
_HEAD_START: Final = 4_000_000
"""Cycles that the device waits, about 2 ms: by then the host has launched what is to be timed."""


class DecodeByRows:
    """Implements ``CudaGraphSupport`` with several backends; plans are ``RoutedPlan``.

    Args:
        backends: by name, the highest rank first; all of them take part in CUDA graphs.
        context: of the engine.
        measure: on the device, unless a test says otherwise.
    """

    def __init__(
        self,
        backends: Mapping[str, AttentionBackend],
        context: AttentionContext,
        measure: Measure | None = None,
    ) -> None:
        assert all(one.cuda_graphs is not None for one in backends.values())
        self._backends = dict(backends)
        self._context = context
        self._measure = measure or measure_on_device
        self._fastest: dict[int, str] = {}
        self._for_shared = next(
            (one for one in backends.values() if one.takes_shared_prefixes), None
        )
        self.takes_shared_prefixes = self._for_shared is not None

    def prepare_capture(self, batch: Batch) -> RoutedPlan:
        """Return the plan of the backend that is fastest for ``batch.num_rows`` rows.

        With shared prefixes, of the first one that takes them: that is where the time goes.
        """
        backend = self._backends[self._choose(batch.num_rows)]
        if batch.shared is not None and self._for_shared is not None:
            backend = self._for_shared
        assert backend.cuda_graphs is not None
        return RoutedPlan(backend, backend.cuda_graphs.prepare_capture(batch))

    def enqueue(self, batch: Batch, plan: RoutedPlan) -> None:
        """Launch what that backend has before the first layer."""
        assert plan.backend.cuda_graphs is not None
        plan.backend.cuda_graphs.enqueue(batch, plan.plan)

    def prepare_replay(self, plan: RoutedPlan, kv_lens: npt.NDArray[np.int32], slot: int) -> None:
        """Let that backend plan the next replay."""
        assert plan.backend.cuda_graphs is not None
        plan.backend.cuda_graphs.prepare_replay(plan.plan, kv_lens, slot)

    def _choose(self, num_rows: int) -> str:
        first, *others = self._backends
        rows = min(1 << (num_rows - 1).bit_length(), self._context.max_running_requests)
        found = self._fastest.get(rows)
        if found is not None:
            return found
        times = {
            name: self._measure(backend, self._context, rows)
            for name, backend in self._backends.items()
        }
        known = {name: time for name, time in times.items() if time is not None}
        if len(known) < len(times):
            return first  # no pool yet: this is a rehearsal
        best = min(others, key=known.__getitem__, default=first)
        if known[best] >= known[first] * (1 - _LEAST_GAIN):
            best = first
        else:
            logger.info(
                "decode graphs of up to %d rows attend through %s: %.1f us a layer, %s takes %.1f",
                rows, best, known[best], first, known[first],
            )  # fmt: skip
        self._fastest[rows] = best
        return best


def measure_on_device(
    backend: AttentionBackend, context: AttentionContext, num_rows: int
) -> float | None:
    """Return the microseconds of one layer, launched as in a graph, over random pages of the pool.

    Args:
        backend: takes part in CUDA graphs.
        context: whose pool has its pages.
        num_rows: with 1,024 tokens on average, if there are so many pages.
    """
    page_size, num_pages = context.page_size, context.kv_pool.num_pages
    longest = min(_TOKENS, context.max_seq_len)
    num_tokens = min(longest, (num_pages - 1) * page_size // num_rows)
    if num_tokens < min(_LEAST_TOKENS, longest):
        return None
    batch = _decode_batch(context, num_rows, num_tokens)
    graphs = backend.cuda_graphs
    assert graphs is not None
    plan = graphs.prepare_capture(batch)
    graphs.enqueue(batch, plan)
    shape = (num_rows, context.num_q_heads, context.head_dim)
    q = torch.zeros(shape, dtype=context.dtype, device=context.device)
    layers = [
        AttentionLayerSpec(
            index=index,
            num_q_heads=context.num_q_heads,
            num_kv_heads=context.num_kv_heads,
            head_dim=context.head_dim,
            scale=context.head_dim**-0.5,
        )
        for index in range(min(_LAYERS, context.num_layers))
    ]
    times: list[float] = []
    for number in range(1 + _ROUNDS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]  # noqa: SLF001
        before.record()
        for layer in layers:
            backend.attend(q, layer, plan)
        after.record()
        after.synchronize()
        if number:  # the first one loads what has not been loaded yet
            times.append(1000 * before.elapsed_time(after) / len(layers))
    return statistics.median(times)


def _decode_batch(context: AttentionContext, num_rows: int, num_tokens: int) -> Batch:
    """Return decode rows of ``num_tokens`` tokens on average, as unequal as usual, on random pages.

    What evens out rows of different lengths better would not show with equal ones.
    """
    device = context.device
    random = torch.Generator(device).manual_seed(0)
    kv_lens = np.full(num_rows, num_tokens, dtype=np.int32)
    if num_rows > 1:
        shortest = max(1, num_tokens // 5)
        longest = min(2 * num_tokens - shortest, context.max_seq_len)
        kv_lens = np.linspace(shortest, longest, num_rows).astype(np.int32)
        np.random.default_rng(0).shuffle(kv_lens)
    shape = (num_rows, -(-int(kv_lens.max()) // context.page_size))
    pages = torch.randint(
        1, context.kv_pool.num_pages, shape, generator=random, dtype=torch.int32, device=device
    )
    rows = torch.arange(num_rows, device=device)
    return Batch(
        input_ids=rows,
        positions=rows,
        slots=rows,
        sample_indices=None,
        rows=rows,
        num_decode_rows=num_rows,
        query_lens=np.ones(num_rows, dtype=np.int32),
        kv_lens=kv_lens,
        kv_lens_device=torch.from_numpy(kv_lens).to(device),
        page_table=pages,
        page_size=context.page_size,
    )
