"""Rows of random K and V in a pool that is otherwise not a number, and exact attention over them.

What the attention contract (``minisgl.testing.attention_contract``) is made of.
"""

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.batch import Batch, SharedPrefixes, list_groups
from minisgl.attention.interface import AttentionContext, AttentionLayerSpec
from minisgl.kernel.ops import OpTable
from minisgl.kvcache.interface import KVPoolSpec
from minisgl.kvcache.mha_pool import MHAKVCachePool

Groups = Sequence[tuple[Sequence[int], int]]
"""Rows that share a prefix, and how many tokens of it: whole pages, fewer than any of them has."""

TOLERANCES: Final = MappingProxyType(
    {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
)
"""By dtype: the largest relative error, by norm, of a token's output."""


class PagedRows:
    """A pool, a page table and random rows, for one shape of attention.

    Pages of a row lie in random order. Every element of the pool that no row owns is NaN: other
    pages, the dummy page 0, and what follows a row's last token in its last page (or ``tail``
    there). The last row of the table is the padding row, whose only page is the dummy.

    Args:
        lengths: tokens of each row.
        page_size, num_q_heads, num_kv_heads, head_dim: the shape.
        num_layers: layers of the pool, each with its own K and V.
        max_rows: most rows of a launch; ``None`` is the number of rows.
        dtype, device: of queries, K and V.
        ops: what a backend is given.
        seed: of everything random.
        tail: what follows a row's last token in its last page.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        page_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_layers: int = 1,
        max_rows: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: OpTable | None = None,
        seed: int = 0,
        tail: float = math.nan,
    ) -> None:
        self.lengths = tuple(lengths)
        self.device = torch.device(device)
        self.dtype = dtype
        self.page_size = page_size
        self.padding_row = len(lengths)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self.layers = [
            AttentionLayerSpec(
                index=index,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5 * (1 + index),
            )
            for index in range(num_layers)
        ]
        width = -(-max(lengths) // page_size)
        num_pages = 2 + 2 * len(lengths) * width
        self.pool = MHAKVCachePool(
            KVPoolSpec(
                num_layers=num_layers,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                dtype=dtype,
                device=self.device,
            )
        )
        self.context = AttentionContext(
            device=self.device,
            dtype=dtype,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            page_size=page_size,
            kv_pool=self.pool,
            max_running_requests=max_rows or len(lengths),
            max_seq_len=width * page_size,
            ops=ops or OpTable(),
        )
        pages = 1 + np.random.default_rng(seed).permutation(num_pages - 1)[: len(lengths) * width]
        table = np.zeros((len(lengths) + 1, width), dtype=np.int32)
        table[:-1] = pages.reshape(len(lengths), width)
        # Behind a row's last page stands anything: here a page that nobody owns.
        unowned = next(page for page in range(1, num_pages) if page not in pages)
        for row, length in enumerate(lengths):
            table[row, -(-length // page_size) :] = unowned
        self.page_table = torch.from_numpy(table).to(self.device)
        self._table = table
        self._num_pages = num_pages
        self._tail = tail
        on_gpu = self.device.type == "cuda"
        self._staged = torch.empty(1 << 18, dtype=torch.int64, pin_memory=on_gpu)
        self._num_staged = 0
        self._k: list[list[torch.Tensor]] = []
        self._v: list[list[torch.Tensor]] = []

    def allocate(self) -> None:
        """Give the pool its memory and write the rows, as engines do after they made a backend."""
        self.pool.allocate(self._num_pages)
        for layer in self.layers:
            for part, kept in zip(self.pool.layer(layer.index), (self._k, self._v), strict=True):
                part.fill_(float("nan"))
                kept.append([self._write(part, row) for row in range(len(self.lengths))])

    def share(self, groups: Groups) -> None:
        """Let rows of each group begin with the pages of the group's first one.

        Args:
            groups: no row is in two of them.
        """
        for (first, *others), num_tokens in groups:
            columns = num_tokens // self.page_size
            self._table[others, :columns] = self._table[first, :columns]
            for kept in (*self._k, *self._v):
                for row in others:
                    kept[row][:num_tokens] = kept[first][:num_tokens]
        self.page_table.copy_(torch.from_numpy(self._table))

    def shared_prefixes(self, order: Sequence[int], groups: Groups, size: int) -> SharedPrefixes:
        """Return what a launch of the rows ``order`` is told of ``groups``, for ``size`` rows.

        Of a group that has fewer than two rows in ``order`` it is told nothing.
        """
        places = np.full(len(order), -1, dtype=np.int32)
        for number, (rows, _) in enumerate(groups):
            inside = np.flatnonzero(np.isin(order, rows))
            places[inside if len(inside) > 1 else []] = number
        tokens = np.array([tokens for _, tokens in groups], dtype=np.int32)
        members, parts, starts = list_groups(places, tokens, size)
        return SharedPrefixes(
            members=self.to_device(members.tolist(), torch.int32),
            groups=self.to_device(parts.flatten().tolist(), torch.int32).view(parts.shape),
            starts=self.to_device(starts.tolist(), torch.int32),
        )

    def queries(self, num_tokens: int) -> torch.Tensor:
        """Return random queries ``[tokens, q_heads, head_dim]``."""
        layer = self.layers[0]
        return self._random(num_tokens, layer.num_q_heads, layer.head_dim)

    def batch(
        self,
        rows: Sequence[int],
        kv_lens: Sequence[int],
        query_lens: Sequence[int] | None = None,
        num_decode_rows: int | None = None,
    ) -> Batch:
        """Return a launch.

        Args:
            rows: of the page table; one may occur twice.
            kv_lens: tokens that each row's attention sees, at most the row's length.
            query_lens: the last so many of them are queries; ``None`` is one each.
            num_decode_rows: ``None`` is all if ``query_lens`` is ``None``, else none.
        """
        if num_decode_rows is None:
            num_decode_rows = len(rows) if query_lens is None else 0
        query = np.array(query_lens or [1] * len(rows), dtype=np.int32)
        seen = np.array(kv_lens, dtype=np.int32)
        unused = torch.zeros(int(query.sum()), dtype=torch.int64, device=self.device)
        return Batch(
            input_ids=unused,
            positions=unused,
            slots=unused,
            sample_indices=None,
            rows=self.to_device(rows, torch.int64),
            num_decode_rows=num_decode_rows,
            query_lens=query,
            kv_lens=seen,
            kv_lens_device=self.to_device(kv_lens, torch.int32),
            page_table=self.page_table,
            page_size=self.page_size,
        )

    def to_device(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a fresh tensor on the device; the host does not wait for the copy.

        Staged in pinned memory of which no part is ever used again.
        """
        first = self._num_staged
        self._num_staged += len(values)
        assert self._num_staged <= len(self._staged), "more launches than a test should need"
        staged = self._staged[first : self._num_staged].view(dtype)[: len(values)]
        staged.numpy()[:] = values
        return torch.empty_like(staged, device=self.device).copy_(staged, non_blocking=True)

    def expected(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        rows: Sequence[int],
        kv_lens: Sequence[int] | npt.NDArray[np.int32],
        query_lens: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> torch.Tensor:
        """Return causal attention in float64; arguments as for ``batch``."""
        chunks = np.array([1] * len(rows) if query_lens is None else query_lens)
        # A row's queries are its last tokens: the i-th of c sees all but the c - 1 - i last.
        ends = np.repeat(np.cumsum(chunks), chunks)
        visible = np.repeat(kv_lens, chunks) - (ends - 1 - np.arange(chunks.sum()))
        owners = np.repeat(rows, chunks)
        out = torch.empty(q.shape, dtype=torch.float64, device=self.device)
        for row in np.unique(owners):
            tokens = torch.from_numpy(np.flatnonzero(owners == row)).to(self.device)
            seen = torch.from_numpy(visible[owners == row]).to(self.device)
            k, v = (kept[layer.index][row].double() for kept in (self._k, self._v))
            out[tokens] = _attention(q[tokens].double(), k, v, seen, layer.scale)
        return out

    def _write(self, part: torch.Tensor, row: int) -> torch.Tensor:
        length = self.lengths[row]
        values = self._random(length, *part.shape[2:])
        flat = part.view(-1, *part.shape[2:])
        flat[self._slots(row, np.arange(length))] = values
        behind = np.arange(length, -(-length // self.page_size) * self.page_size)
        flat[self._slots(row, behind)] = self._tail
        return values

    def _slots(self, row: int, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        slots = self._table[row, positions // self.page_size].astype(np.int64) * self.page_size
        return torch.from_numpy(slots + positions % self.page_size).to(self.device)

    def _random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator, device=self.device)
        return values.to(self.dtype)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Queries ``[t, heads, d]`` see the first ``seen`` ``[t]`` of K and V ``[n, kv_heads, d]``."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.arange(len(k), device=q.device) >= seen[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def largest_error(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Return the largest relative error of a token's output, by norm, and the token.

    Args:
        out: ``[tokens, heads, dim]``.
        expected: the same in float64.
    """
    difference = (out.double() - expected).flatten(1).norm(dim=1)
    error = (difference / expected.flatten(1).norm(dim=1)).nan_to_num(nan=float("inf"))
    return float(error.max()), int(error.argmax())
