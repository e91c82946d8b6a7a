"""Attention at given shapes: what a case is, the batch that it makes, and its time on a backend."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend, AttentionContext, AttentionLayerSpec
from minisgl.benchmark.timing import Call, Timing, num_copies, time_calls
from minisgl.errors import SettingsError
from minisgl.kernel.jit import JitLoader
from minisgl.kvcache.interface import KVCachePool, KVPoolSpec
from minisgl.plugins.host import PluginHost
from minisgl.plugins.records import BackendQuery, Phase
from minisgl.plugins.selection import select_attention, select_kv_pool, select_ops
from minisgl.settings import Settings

_SYNTAX: Final = re.compile(
    r"(?P<phase>decode|prefill):(?P<rows>\d+)x(?P<low>\d+)(-(?P<high>\d+))?"
    r":(?P<q>\d+)/(?P<kv>\d+)x(?P<dim>\d+):p(?P<page>\d+)"
)
_EXAMPLE: Final = "decode:256x450-1350:16/8x128:p16"

_MOST_LAYERS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One launch.

    Attributes:
        phase: ``decode``: one token a row; ``prefill``: all tokens of a row.
        num_rows: sequences.
        lengths: shortest and longest of them, in tokens.
        num_q_heads, num_kv_heads, head_dim: as usual.
        page_size: tokens a page.
    """

    phase: Phase
    num_rows: int
    lengths: tuple[int, int]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    def __str__(self) -> str:
        low, high = self.lengths
        length = str(low) if low == high else f"{low}-{high}"
        return (
            f"{self.phase}:{self.num_rows}x{length}:{self.num_q_heads}/{self.num_kv_heads}"
            f"x{self.head_dim}:p{self.page_size}"
        )

    def kv_lens(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return the length of each row, int32 ``[rows]``, the same in every run."""
        draw = random.Random(0).randint  # noqa: S311
        return np.array([draw(*self.lengths) for _ in range(self.num_rows)], dtype=np.int32)

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of K and V that one layer reads."""
        tokens = int(self.kv_lens().sum())
        return 2 * tokens * self.num_kv_heads * self.head_dim * itemsize

    def flops(self) -> int:
        """Return the operations of both products of one layer; what the mask hides not counted."""
        lengths = self.kv_lens().astype(np.int64)
        pairs = lengths if self.phase == "decode" else lengths * (lengths + 1) // 2
        return 4 * int(pairs.sum()) * self.num_q_heads * self.head_dim


def parse_case(text: str) -> AttentionCase:
    """Return the case that a preset or ``PHASE:ROWSxMIN-MAX:Q/KVxDIM:pPAGE`` stands for.

    Raises:
        SettingsError: it is neither.
    """
    match = _SYNTAX.fullmatch(PRESETS.get(text, text))
    if match is None:
        raise SettingsError(
            f"{text!r} is no case; known: {', '.join(PRESETS)}, or one of your own, such as "
            f"{_EXAMPLE}"
        )
    low = int(match["low"])
    case = AttentionCase(
        phase="decode" if match["phase"] == "decode" else "prefill",
        num_rows=int(match["rows"]),
        lengths=(low, int(match["high"] or low)),
        num_q_heads=int(match["q"]),
        num_kv_heads=int(match["kv"]),
        head_dim=int(match["dim"]),
        page_size=int(match["page"]),
    )
    sizes = (case.num_rows, low, case.num_kv_heads, case.head_dim, case.page_size)
    if min(sizes) < 1 or low > case.lengths[1] or case.num_q_heads % case.num_kv_heads:
        raise SettingsError(
            f"{text!r}: all numbers are at least 1, MIN is at most MAX, and KV heads divide Q heads"
        )
    return case


PRESETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "decode-256-p1": "decode:256x450-1350:16/8x128:p1",
        "decode-256": "decode:256x450-1350:16/8x128:p16",
        "decode-256-p64": "decode:256x450-1350:16/8x128:p64",
        "decode-64": "decode:64x450-1350:16/8x128:p16",
        "decode-1": "decode:1x4096:16/8x128:p16",
        "decode-256-40": "decode:256x450-1350:40/8x128:p16",
        "decode-long": "decode:64x4096-12288:32/4x128:p64",
        "prefill-8k": "prefill:1x8192:32/8x128:p16",
        "prefill-16x1k": "prefill:16x1024:16/8x128:p16",
        "small-decode": "decode:16x200-600:16/8x128:p16",
        "small-prefill": "prefill:2x256:16/8x128:p16",
    }
)
"""The small ones are for a CPU."""


def default_cases(device: torch.device) -> tuple[str, ...]:
    """Return the presets that a device can run in seconds."""
    small = tuple(name for name in PRESETS if name.startswith("small"))
    return small if device.type == "cpu" else tuple(name for name in PRESETS if name not in small)


def query_of(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> BackendQuery:
    """Return what backends are asked about a case."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    name = str(dtype).removeprefix("torch.")
    return BackendQuery(
        device=device.type,
        compute_capability=capability,
        dtype=name,
        kv_dtype=name,
        page_size=case.page_size,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
    )


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
        self._query = query_of(case, device, dtype)
        self._ops, self._jit = select_ops(host, self._query), JitLoader(device)
        kv_lens = case.kv_lens()
        num_layers = num_copies(case.kv_bytes(dtype.itemsize), device, most=_MOST_LAYERS)
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
        self._pool.allocate(int((-(-kv_lens // case.page_size)).sum()) + 1)
        for index in range(num_layers):
            for tensor in self._pool.layer(index):
                tensor.normal_()
        self.batch = make_batch(case, device)
        self._q = torch.randn(
            self.batch.num_tokens, case.num_q_heads, case.head_dim, dtype=dtype, device=device
        )
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
        """Return the time of one layer on the backend ``name``.

        Raises:
            PluginError: it is unknown, or it cannot run this case; says why.
        """
        backend = self.create(name)
        with torch.inference_mode():
            plan, graph = self.plan(backend)

            def one(layer: AttentionLayerSpec) -> Call:
                return lambda: backend.attend(self._q, layer, plan)

            calls = [one(layer) for layer in self._layers]
            return time_calls(calls, self._device, graph=graph, shortest_s=shortest_s)

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
        choice = f"{name},auto" if case.phase == "prefill" else f"auto,{name}"
        chosen = select_attention(self._host, self._query, choice, self._settings.backend_options)
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
            max_seq_len=case.lengths[1],
            ops=self._ops,
            jit=self._jit,
        )
        if case.phase == "prefill":
            return chosen.prefill.create(context, chosen.prefill_settings)
        return chosen.decode.create(context, chosen.decode_settings)

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """Return the output of the first layer, planned as it is for ``time``."""
        plan, _ = self.plan(backend)
        with torch.inference_mode():
            return backend.attend(self._q, self._layers[0], plan)


def make_batch(case: AttentionCase, device: torch.device) -> Batch:
    """Return the launch of a case, its rows' pages shuffled over the pool."""
    kv_lens = case.kv_lens()
    query_lens = np.ones_like(kv_lens) if case.phase == "decode" else kv_lens
    pages_of = -(-kv_lens // case.page_size)
    pages = np.random.default_rng(0).permutation(np.arange(1, int(pages_of.sum()) + 1))
    table = np.zeros((case.num_rows, int(pages_of.max())), dtype=np.int32)
    first = 0
    for row, count in enumerate(pages_of.tolist()):
        table[row, :count] = pages[first : first + count]
        first += count
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
    )
