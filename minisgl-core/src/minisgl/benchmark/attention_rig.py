"""One launch of attention in a pool as a server has it: its batch, and its time on a backend."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from minisgl.attention.batch import Batch, SharedPrefixes, list_groups
from minisgl.attention.interface import AttentionBackend, AttentionContext, AttentionLayerSpec
from minisgl.benchmark.attention_cases import AttentionCase, query_of
from minisgl.benchmark.timing import Call, Timing, num_copies, time_calls
from minisgl.kernel.jit import JitLoader
from minisgl.kvcache.interface import KVCachePool, KVPoolSpec
from minisgl.plugins.host import PluginHost
from minisgl.plugins.records import BackendQuery
from minisgl.plugins.selection import attention_record, select_kv_pool, select_ops
from minisgl.settings import Settings
from minisgl.testing.paged_rows import largest_error

_MOST_LAYERS: Final = MappingProxyType({"decode": 64, "prefill": 4})
"""A prefill finds K and V of its own tokens in the cache, where another kernel has just written."""

_DECODE_LAYERS, _DECODE_BYTES = 8, 2**33
"""Of a decode graph, at least: so many, as far as they take no more memory."""

_SAMPLED_TOKENS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What running a backend on a rig has shown.

    Attributes:
        timing: of one layer.
        set_up_s: seconds until the first layer's first output was there: creating, planning,
            compiling.
        sampled: by layer, the output of some tokens after the last timed run, ``[n, heads, dim]``.
        finite: whether all of the output was numbers.
    """

    timing: Timing
    set_up_s: float
    sampled: Mapping[int, torch.Tensor]
    finite: bool


class AttentionRig:
    """The pool and the batch of one case; backends take turns on it.

    The pool has as many layers as it takes to hold much more than the device's cache, and the
    pages of a row lie all over it, as in a server that has run for a while.

    Args:
        case: what is attended to.
        host: offers pools and backends.
        settings: which pool, and the options of backends.
        device, dtype: where, and in what.
    """

    def __init__(
        self,
        case: AttentionCase,
        host: PluginHost,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._case, self._host, self._settings = case, host, settings
        self._device, self._dtype = device, dtype
        self._query = pool_query(case, host, settings, device, dtype)
        self._ops, self._jit = select_ops(host, self._query), JitLoader(device)
        num_layers = count_layers(case, device, dtype)
        spec = KVPoolSpec(
            num_layers=num_layers,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            page_size=case.page_size,
            dtype=dtype,
            device=device,
        )
        chosen = select_kv_pool(host, self._query, settings.cache.pool, settings.backend_options)
        self._pool: KVCachePool = chosen.record.create(spec, chosen.settings)
        self._pool.allocate(count_pages(case) + 1)
        for index in range(num_layers):
            for tensor in self._pool.layer(index):
                tensor.normal_()
        self.batch = make_batch(case, device)
        self._q = torch.randn(
            self.batch.num_tokens, case.num_q_heads, case.head_dim, dtype=dtype, device=device
        )
        self.sampled = sample_tokens(self.batch.num_tokens)
        self._expected: dict[int, torch.Tensor] = {}
        self._layers = [
            AttentionLayerSpec(
                index=index,
                num_q_heads=case.num_q_heads,
                num_kv_heads=case.num_kv_heads,
                head_dim=case.head_dim,
                scale=case.head_dim**-0.5,
            )
            for index in range(num_layers)
        ]

    def time(self, name: str, shortest_s: float) -> Timing:
        """Return the time of one layer on the backend ``name``; see ``run``."""
        return self.run(name, shortest_s).timing

    def run(self, name: str, shortest_s: float) -> Run:
        """Attend in all layers on the backend ``name``, again and again.

        Args:
            name: of the backend.
            shortest_s: least seconds of a measurement.

        Raises:
            PluginError: it is unknown, or it cannot run this case; says why.
        """
        began = time.perf_counter()
        backend = self.create(name)
        outputs: dict[int, torch.Tensor] = {}
        checked = self.checked_layers

        def one(layer: AttentionLayerSpec) -> Call:
            if layer.index not in checked:
                return lambda: backend.attend(self._q, layer, plan)

            def keep() -> None:
                outputs[layer.index] = backend.attend(self._q, layer, plan)

            return keep

        with torch.inference_mode():
            plan, graph = self.plan(backend)
            calls = [one(layer) for layer in self._layers]
            calls[0]()  # what compiles does so now
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            set_up_s = time.perf_counter() - began
            timing = time_calls(calls, self._device, graph=graph, shortest_s=shortest_s)
            kept = {index: outputs[index][self.sampled] for index in checked}
            finite = all(bool(one.isfinite().all()) for one in outputs.values())
        return Run(timing=timing, set_up_s=set_up_s, sampled=kept, finite=finite)

    def largest_error(self, run: Run) -> float:
        """Return the largest relative error, by norm, of any sampled token in any checked layer.

        Infinite if any element of an output, sampled or not, is not a number.
        """
        if not run.finite:
            return math.inf
        return max(
            largest_error(run.sampled[index], self._exact(index))[0]
            for index in self.checked_layers
        )

    @property
    def checked_layers(self) -> tuple[int, ...]:
        """Layers whose output is compared: the first and the last."""
        return tuple({0, len(self._layers) - 1})

    def _exact(self, index: int) -> torch.Tensor:
        """Return what the sampled tokens' output is in a layer, float64 ``[n, heads, dim]``."""
        if index not in self._expected:
            with torch.inference_mode():
                self._expected[index] = attend_exactly(
                    self._q, self._pool.layer(index), self.batch, self.sampled
                )
        return self._expected[index]

    def plan(self, backend: AttentionBackend) -> tuple[Any, bool]:
        """Plan the launch; return the plan, and whether it is one for a CUDA graph.

        The one place that knows how backends are planned. What a backend launches at the head of
        a graph runs here, once: it is work of a launch, and what is timed is the work of a layer.
        """
        graphs = backend.cuda_graphs if self._case.phase == "decode" else None
        with torch.inference_mode():
            if graphs is None:
                return backend.plan(self.batch, 0), False
            plan = graphs.prepare_capture(self.batch)
            graphs.prepare_replay(plan, self.batch.kv_lens, 0)
            graphs.enqueue(self.batch, plan)
            return plan, True

    def create(self, name: str) -> AttentionBackend:
        """Return a backend over this pool, for this case's phase."""
        case = self._case
        record, settings = attention_record(
            self._host, self._query, name, case.phase, self._settings.backend_options
        )
        context = AttentionContext(
            device=self._device,
            dtype=self._dtype,
            num_q_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            num_layers=len(self._layers),
            page_size=case.page_size,
            kv_pool=self._pool,
            max_running_requests=case.num_rows,
            max_seq_len=case.prefix + case.lengths[1],
            ops=self._ops,
            jit=self._jit,
        )
        return record.create(context, settings)

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """Return the output of the first layer, planned as it is for ``time``."""
        plan, _ = self.plan(backend)
        with torch.inference_mode():
            return backend.attend(self._q, self._layers[0], plan)


def pool_query(
    case: AttentionCase,
    host: PluginHost,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
) -> BackendQuery:
    """Return what backends are asked about a case, with the layout of the pool that is set."""
    query = query_of(case, device, dtype)
    pool = select_kv_pool(host, query, settings.cache.pool, settings.backend_options)
    return replace(query, kv_layout=pool.record.capabilities.kv_layout)


def check_pool(
    cases: Iterable[AttentionCase],
    host: PluginHost,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Refuse a KV pool that cannot hold one of the cases.

    Raises:
        UnknownBackendError, UnsupportedBackendError: see ``select_kv_pool``.
    """
    for case in cases:
        pool_query(case, host, settings, device, dtype)


def count_layers(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> int:
    """Return the layers of a case's pool: together they hold much more than the device's cache.

    Decode gets some more where they are small: the pause between two replays is shared by them.
    """
    num_bytes = case.kv_bytes(dtype.itemsize)
    enough = num_copies(num_bytes, device, most=_MOST_LAYERS[case.phase])
    if case.phase == "prefill":
        return enough
    return max(enough, min(_DECODE_LAYERS, _DECODE_BYTES // num_bytes))


def sample_tokens(num_tokens: int) -> list[int]:
    """Return tokens of a launch to compare: the first, the last, and some between."""
    return sorted(set(np.linspace(0, num_tokens - 1, _SAMPLED_TOKENS).astype(int).tolist()))


def attend_exactly(
    q: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    tokens: Sequence[int],
) -> torch.Tensor:
    """Return causal attention of some tokens of a launch, in float64, written out.

    Args:
        q: ``[T, q_heads, head_dim]``.
        layer: K and V of the pool, each ``[pages, page_size, kv_heads, head_dim]``.
        batch: the launch.
        tokens: of ``T``.

    Returns:
        ``[tokens, q_heads, head_dim]``.
    """
    of_row = np.repeat(np.arange(batch.num_rows), batch.query_lens)
    outputs = []
    for token in tokens:
        seen = int(batch.positions[token]) + 1
        pages = batch.page_table[int(of_row[token]), : -(-seen // batch.page_size)].long()
        k, v = (part[pages].flatten(0, 1)[:seen].double() for part in layer)
        grouped = q[token].double().view(k.shape[1], -1, k.shape[2])
        scores = torch.einsum("hgd,khd->hgk", grouped, k) * k.shape[2] ** -0.5
        out = torch.einsum("hgk,khd->hgd", scores.softmax(dim=-1), v)
        outputs.append(out.flatten(0, 1))
    return torch.stack(outputs)


def make_batch(case: AttentionCase, device: torch.device) -> Batch:
    """Return the launch of a case, its rows' pages shuffled over the pool."""
    kv_lens = case.kv_lens()
    query_lens = np.ones_like(kv_lens) if case.phase == "decode" else case.own_lens()
    table = _page_table(case)
    positions = np.concatenate(
        [np.arange(kv - query, kv) for kv, query in zip(kv_lens, query_lens, strict=True)]
    )
    of_row = np.repeat(np.arange(case.num_rows), query_lens)
    offsets = positions % case.page_size
    slots = table[of_row, positions // case.page_size].astype(np.int64) * case.page_size + offsets
    return Batch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        sample_indices=None,
        rows=torch.arange(case.num_rows, device=device),
        num_decode_rows=case.num_rows if case.phase == "decode" else 0,
        query_lens=query_lens,
        kv_lens=kv_lens,
        kv_lens_device=torch.from_numpy(kv_lens).to(device),
        page_table=torch.from_numpy(table).to(device),
        page_size=case.page_size,
        shared=_shared_prefix(case, device),
    )


def _shared_prefix(case: AttentionCase, device: torch.device) -> SharedPrefixes | None:
    """Name the prefix that all decode rows share, for the backends that read it once."""
    if not _shared_pages(case):
        return None
    group_of, tokens = np.zeros(case.num_rows, np.int32), np.array([case.prefix], np.int32)
    parts = list_groups(group_of, tokens, case.num_rows)
    members, groups, starts = (torch.from_numpy(part).to(device) for part in parts)
    return SharedPrefixes(members=members, groups=groups, starts=starts)


def count_pages(case: AttentionCase) -> int:
    """Return the pages that the rows of a case hold, those of a shared prefix once."""
    return _shared_pages(case) + int(_own_pages(case).sum())


def _shared_pages(case: AttentionCase) -> int:
    return case.prefix // case.page_size if case.phase == "decode" else 0


def _own_pages(case: AttentionCase) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return how many pages each row has to itself, int32 ``[rows]``."""
    return -(-case.kv_lens() // case.page_size) - np.int32(_shared_pages(case))


def _page_table(case: AttentionCase) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Return the pages of each row, in random order; decode rows begin with the same prefix."""
    pages = np.random.default_rng(0).permutation(np.arange(1, count_pages(case) + 1))
    shared, own_pages = _shared_pages(case), _own_pages(case)
    table = np.zeros((case.num_rows, shared + int(own_pages.max())), dtype=np.int32)
    table[:, :shared] = pages[:shared]
    taken = shared
    for row, count in enumerate(own_pages.tolist()):
        table[row, shared : shared + count] = pages[taken : taken + count]
        taken += count
    return table
