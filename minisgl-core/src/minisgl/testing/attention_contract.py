"""The contract that every attention backend keeps, as tests to inherit.

A third-party backend proves itself with a subclass in its own tests::

    class TestPlainAttention(AttentionBackendContract):
        device, dtype = "cuda", torch.bfloat16

        def create(self, context):
            return PlainAttention(context, PlainSettings())

Every test compares with attention in float64, token by token, by relative norm. Needs pytest.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.kernel.ops import OpTable
from minisgl.testing.graph_recorder import GraphRecorder
from minisgl.testing.paged_rows import TOLERANCES, Groups, PagedRows, largest_error

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 300, 777)
"""Tokens of the rows: below, at and above the borders of pages and of kernels' tiles."""

_STALL_CYCLES = 20_000_000


def _groups(page_size: int) -> Groups:
    """Return groups of rows of ``LENGTHS``: short and long prefixes, of two rows and of many."""
    groups: list[tuple[Sequence[int], int]] = [((7, 8), 64), ((11, 10), 256)]
    if page_size < 64:
        groups.append(((9, 6, 5, 4), 16))
    return groups


class AttentionBackendContract:
    """Inherit, override ``create`` and whatever the backend does not serve, and run pytest.

    Attributes:
        device, dtype: to test on.
        phases: of ``prefill`` and ``decode``, that the backend serves.
        page_sizes, groups (query heads per KV head), head_dims: to test.
        usual_page_size: of the tests that run with one alone.
        num_kv_heads: KV heads of all tests.
        mixed_batches: whether a launch may hold decode and prefill rows.
        graph_sizes: rows of the graphs to record, where the backend takes part in CUDA graphs.
        num_launches: of the tests that reuse buffers.
        synchronizes: whether ``plan`` waits for the device; a backend that serves must not.
        tolerance: largest relative error of a token; ``None`` is a value for the dtype.
        tail: what follows a row's last token in its last page. A pool hands pages on as they are,
            so that is whatever other requests left there. A backend that multiplies it with 0
            rather than leave it alone needs a number, and says so here: one request that computed
            infinities would spoil another.
    """

    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32
    phases: ClassVar[Sequence[str]] = ("prefill", "decode")
    page_sizes: ClassVar[Sequence[int]] = (1, 16, 64)
    usual_page_size: ClassVar[int] = 16
    groups: ClassVar[Sequence[int]] = (1, 2, 4, 5, 8)
    head_dims: ClassVar[Sequence[int]] = (64, 128)
    num_kv_heads: ClassVar[int] = 2
    mixed_batches: ClassVar[bool] = False
    graph_sizes: ClassVar[Sequence[int]] = (1, 2, 7, 16, 40, 64)
    num_launches: ClassVar[int] = 100
    synchronizes: ClassVar[bool] = False
    tolerance: ClassVar[float | None] = None
    tail: ClassVar[float] = math.nan

    def create(self, context: AttentionContext) -> AttentionBackend:
        """Return the backend under test; the pool of ``context`` has no memory yet."""
        raise NotImplementedError

    def ops(self) -> OpTable:
        """Return the operations that the backend is given: the torch references."""
        return OpTable()

    # -- the tests

    def test_decode(self, page_size: int, group: int, head_dim: int) -> None:
        """Rows of very different lengths, from one token on, each with its last token's query."""
        self._needs("decode")
        rows, backend = self._make(page_size, group, head_dim)
        order = [*range(len(LENGTHS))][::-1]
        self._check(backend, rows, order, [LENGTHS[row] for row in order])

    def test_decode_of_a_single_row(self, page_size: int, group: int, head_dim: int) -> None:
        """One row alone: the launch that is split most."""
        self._needs("decode")
        rows, backend = self._make(page_size, group, head_dim)
        for row in (0, 4, len(LENGTHS) - 1):
            self._check(backend, rows, [row], [LENGTHS[row]])

    def test_prefill(self, page_size: int, group: int, head_dim: int) -> None:
        """Whole prompts of different lengths in one launch."""
        self._needs("prefill")
        rows, backend = self._make(page_size, group, head_dim)
        order = [9, 0, 4, 10, 2]
        lengths = [LENGTHS[row] for row in order]
        self._check(backend, rows, order, lengths, lengths)

    def test_prefill_behind_a_cached_prefix(
        self, page_size: int, group: int, head_dim: int
    ) -> None:
        """Chunks of prompts whose beginning is in the pool already, one token among them."""
        self._needs("prefill")
        rows, backend = self._make(page_size, group, head_dim)
        order = [3, 11, 9, 8, 10]
        chunks = [1, 200, 129, 64, 3]
        self._check(backend, rows, order, [LENGTHS[row] for row in order], chunks)

    def test_decode_and_prefill_in_one_launch(
        self, page_size: int, group: int, head_dim: int
    ) -> None:
        """Decode rows, then prefill rows, if the backend takes them in one launch."""
        if not self.mixed_batches:
            pytest.skip("takes no decode and prefill rows in one launch")
        rows, backend = self._make(page_size, group, head_dim)
        order = [11, 0, 5, 10, 9]
        lengths = [LENGTHS[row] for row in order]
        self._check(backend, rows, order, lengths, [1, 1, 1, 100, 129], num_decode_rows=3)

    def test_queries_may_be_a_view_of_wider_rows(self, group: int, head_dim: int) -> None:
        """Queries as a slice of a projection's output, in which K and V follow them."""
        self._needs("decode")
        rows, backend = self._make(self.usual_page_size, group, head_dim)
        layer, seen = rows.layers[0], [777, 64]
        wide = torch.cat((rows.queries(2), rows.queries(2)), dim=1)
        q = wide[:, : layer.num_q_heads]
        with torch.inference_mode():
            out = backend.attend(q, layer, backend.plan(rows.batch([11, 6], seen), 0))
        self._compare(out, rows.expected(q, layer, [11, 6], seen))

    def test_launches_of_one_step_do_not_disturb_each_other(self) -> None:
        """Decode and prefill are planned with one slot number, then attend in turns."""
        self._needs("prefill", "decode")
        rows, backend = self._make_usual(num_layers=2)
        decode, prefill = [11, 3, 0], [10, 7]
        seen, chunks = [LENGTHS[row] for row in prefill], [200, 65]
        q_decode, q_prefill = rows.queries(3), rows.queries(265)
        with torch.inference_mode():
            plans = (
                backend.plan(rows.batch(decode, [700, 16, 1]), 0),
                backend.plan(rows.batch(prefill, seen, chunks), 0),
            )
            for layer in rows.layers:
                first = backend.attend(q_decode, layer, plans[0])
                second = backend.attend(q_prefill, layer, plans[1])
                self._compare(first, rows.expected(q_decode, layer, decode, [700, 16, 1]))
                self._compare(second, rows.expected(q_prefill, layer, prefill, seen, chunks))

    def test_planning_does_not_wait_for_the_device(self) -> None:
        """One launch of each slot is planned and launched while the stream stands still."""
        if torch.device(self.device).type != "cuda" or self.synchronizes:
            pytest.skip("waits for the device, or has none")
        rows, backend = self._make_usual()
        layer, q = rows.layers[0], rows.queries(165)
        batches = []
        if "prefill" in self.phases:
            batches.append(rows.batch([10, 7], [300, 65], [100, 65]))
        if "decode" in self.phases:
            batches.append(rows.batch([11, 6], [777, 64]))
        with torch.inference_mode():
            for stalled in (False, True):  # first without: memory and modules are got then
                torch.cuda.synchronize()
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                if stalled:
                    self._stall(10 * _STALL_CYCLES)
                event.record()
                for slot in (0, 1):
                    for batch in batches:
                        tokens = int(batch.query_lens.sum())
                        backend.attend(q[:tokens], layer, backend.plan(batch, slot))
                done = event.query()  # type: ignore[no-untyped-call]
                assert not (stalled and done), "planning waited for the device"

    def test_many_launches_behind_a_stalled_stream(self) -> None:
        """Launches of different lengths are planned while none has run: no buffer is reused early.

        A launch's host buffers are free for the next but one: whatever is copied from them must
        have been copied by then.
        """
        rows, backend = self._make_usual()
        random = np.random.default_rng(0)
        layer, launches = rows.layers[0], []
        with torch.inference_mode():
            for number in range(self.num_launches):
                if number % 4 == 0:
                    self._stall()
                order = random.permutation(len(LENGTHS))[: random.integers(1, len(LENGTHS) + 1)]
                seen = [int(random.integers(1, LENGTHS[row] + 1)) for row in order]
                chunks = None
                if "decode" not in self.phases or ("prefill" in self.phases and number % 3 == 2):
                    chunks = [int(random.integers(1, min(n, 64) + 1)) for n in seen]
                q = rows.queries(len(seen) if chunks is None else sum(chunks))
                batch = rows.batch(order.tolist(), seen, chunks)
                out = backend.attend(q, layer, backend.plan(batch, number % 2))
                launches.append((q, order, seen, chunks, out))
            # The host's arrays were the launch's, not the backend's to keep.
            batch.kv_lens[:] = 0
        for q, order, seen, chunks, out in launches:
            self._compare(out, rows.expected(q, layer, order.tolist(), seen, chunks))

    def test_a_recorded_decode_launch_equals_an_eager_one(
        self, page_size: int, group: int, head_dim: int
    ) -> None:
        """Graphs of several sizes, with and without padding rows, for short and long rows.

        Each is replayed again with rows one token shorter: often all keep their pages, and what was
        planned for these may serve again.
        """
        rows, backend = self._make(page_size, group, head_dim, num_layers=2)
        random = np.random.default_rng(1)
        with self._record(backend, rows) as recorder:
            for size in self.graph_sizes:
                for number, share in enumerate((1.0, 1.0, 0.6, 0.6, 0.0, 1.0)):
                    if number in {0, 2, 4, 5}:
                        order = random.integers(0, len(LENGTHS), size=max(1, int(share * size)))
                        seen = [max(1, int(share * LENGTHS[row])) for row in order]
                    else:
                        seen = [max(1, length - 1) for length in seen]
                    q = [rows.queries(len(order)) for _ in rows.layers]
                    outs = recorder.replay(size, order.tolist(), seen, q, slot=number % 2)
                    with torch.inference_mode():
                        plan = backend.plan(rows.batch(order.tolist(), seen), number % 2)
                        eager = [
                            backend.attend(part, layer, plan)
                            for part, layer in zip(q, rows.layers, strict=True)
                        ]
                    for layer, part, out, other in zip(rows.layers, q, outs, eager, strict=True):
                        expected = rows.expected(part, layer, order.tolist(), seen)
                        self._compare(out, expected)
                        self._compare(other, expected)

    def test_many_replays_behind_a_stalled_stream(self) -> None:
        """Graphs are replayed with different lengths while none has run, with eager launches."""
        rows, backend = self._make_usual()
        random = np.random.default_rng(2)
        layer, launches = rows.layers[0], []
        with self._record(backend, rows) as recorder:
            for number in range(self.num_launches):
                if number % 4 == 0:
                    self._stall()
                size = int(random.choice(self.graph_sizes))
                order = random.integers(0, len(LENGTHS), size=random.integers(1, size + 1))
                seen = [int(random.integers(1, LENGTHS[row] + 1)) for row in order]
                q = rows.queries(len(order))
                (out,) = recorder.replay(size, order.tolist(), seen, [q], slot=number % 2)
                launches.append((q, order, seen, out))
                if number % 2:
                    with torch.inference_mode():
                        chunks = [100, 65] if "prefill" in self.phases else None
                        batch = rows.batch([10, 7], [300, 65], chunks)
                        q = rows.queries(int(batch.query_lens.sum()))
                        backend.attend(q, layer, backend.plan(batch, number % 2))
        for q, order, seen, out in launches:
            self._compare(out, rows.expected(q, layer, order.tolist(), seen))

    def test_shared_prefixes(self, page_size: int, group: int, head_dim: int) -> None:
        """Rows that begin with the same pages, told so: several groups, and rows of none."""
        rows, backend = self._make(page_size, group, head_dim)
        if not backend.takes_shared_prefixes:
            pytest.skip("does not take shared prefixes")
        groups = _groups(page_size)
        rows.share(groups)
        random = np.random.default_rng(3)
        for _ in range(3):
            order = random.permutation(len(LENGTHS))[: random.integers(2, len(LENGTHS) + 1)]
            seen = [LENGTHS[row] for row in order]
            batch = rows.batch(order.tolist(), seen)
            batch.shared = rows.shared_prefixes(order.tolist(), groups, len(LENGTHS))
            q, layer = rows.queries(len(order)), rows.layers[0]
            with torch.inference_mode():
                out = backend.attend(q, layer, backend.plan(batch, 0))
            self._compare(out, rows.expected(q, layer, order.tolist(), seen))

    def test_shared_prefixes_in_graphs(self, page_size: int, group: int, head_dim: int) -> None:
        """Recorded once, replayed with other groups, with fewer rows, and with none that share."""
        rows, backend = self._make(page_size, group, head_dim, num_layers=2)
        if not backend.takes_shared_prefixes:
            pytest.skip("does not take shared prefixes")
        groups = _groups(page_size)
        rows.share(groups)
        random = np.random.default_rng(4)
        with self._record(backend, rows, shared=True) as recorder:
            for number in range(8):
                size = max(self.graph_sizes)
                order = random.permutation(len(LENGTHS))[: random.integers(1, len(LENGTHS) + 1)]
                order = order[:size]
                seen = [LENGTHS[row] for row in order]
                q = [rows.queries(len(order)) for _ in rows.layers]
                told = groups if number % 4 else ()
                outs = recorder.replay(size, order.tolist(), seen, q, slot=number % 2, groups=told)
                for layer, part, out in zip(rows.layers, q, outs, strict=True):
                    self._compare(out, rows.expected(part, layer, order.tolist(), seen))

    # -- what they are made of

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test for every combination of the attributes that it asks for."""
        for name in ("page_size", "group", "head_dim"):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, getattr(self, f"{name}s"))

    def _needs(self, *phases: str) -> None:
        for phase in phases:
            if phase not in self.phases:
                pytest.skip(f"does not serve {phase}")

    def _make_usual(self, num_layers: int = 1) -> tuple[PagedRows, AttentionBackend]:
        shape = (self.usual_page_size, self.groups[-1], self.head_dims[-1])
        return self._make(*shape, num_layers)

    def _make(
        self, page_size: int, group: int, head_dim: int, num_layers: int = 1
    ) -> tuple[PagedRows, AttentionBackend]:
        rows = PagedRows(
            LENGTHS,
            page_size=page_size,
            num_q_heads=self.num_kv_heads * group,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            max_rows=max(len(LENGTHS), *self.graph_sizes),
            dtype=self.dtype,
            device=self.device,
            ops=self.ops(),
            seed=page_size + 100 * group + head_dim,
            tail=self.tail,
        )
        backend = self.create(rows.context)
        rows.allocate()
        return rows, backend

    def _check(
        self,
        backend: AttentionBackend,
        rows: PagedRows,
        order: list[int],
        seen: list[int],
        chunks: list[int] | None = None,
        *,
        num_decode_rows: int | None = None,
    ) -> None:
        """Run one launch of every slot and compare."""
        layer = rows.layers[0]
        for slot in (0, 1):
            q = rows.queries(len(seen) if chunks is None else sum(chunks))
            # Whatever memory the output gets next, it is not a number before it is written.
            del_me = torch.full_like(q, float("nan"))
            del del_me
            with torch.inference_mode():
                plan = backend.plan(rows.batch(order, seen, chunks, num_decode_rows), slot)
                out = backend.attend(q, layer, plan)
            assert out.shape == q.shape
            assert out.dtype == q.dtype
            self._compare(out, rows.expected(q, layer, order, seen, chunks))

    def _compare(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        error, token = largest_error(out, expected)
        limit = self.tolerance or TOLERANCES[self.dtype]
        assert error <= limit, f"relative error {error:.2e} at token {token}, allowed {limit:.0e}"

    def _record(
        self, backend: AttentionBackend, rows: PagedRows, *, shared: bool = False
    ) -> GraphRecorder:
        if backend.cuda_graphs is None or torch.device(self.device).type != "cuda":
            pytest.skip("takes no part in CUDA graphs here")
        return GraphRecorder(backend, rows, self.graph_sizes, shared=shared)

    def _stall(self, cycles: int = _STALL_CYCLES) -> None:
        """Keep the stream busy for a while, so that what follows piles up behind it."""
        if torch.device(self.device).type == "cuda":
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001
