"""Attention in plain torch: any device, dtype, head size and page size; the reference.

Decode rows of similar length are attended to together over gathered pages; prefill rows one by
one. All through torch's scaled_dot_product_attention, or written out when a soft cap is asked for.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend, AttentionContext, AttentionLayerSpec

_MAX_LENGTH_RATIO = 2
"""Rows of one decode group differ in length by at most this factor: padding costs gathers."""


@dataclass(slots=True)
class _DecodeGroup:
    """Decode rows of similar length, padded to the longest in whole pages."""

    rows: torch.Tensor | None
    """int64 ``[n]`` rows of the launch; ``None``: all decode rows, in order."""
    pages: torch.Tensor
    """int64 ``[n * columns]``."""
    lengths: torch.Tensor
    """int64 ``[n]``."""
    num_slots: int
    """Of one row: ``columns * page_size``."""
    unowned: torch.Tensor | None
    """int64: slots of ``[n * num_slots]`` that hold what nobody wrote for this row, or ``None``."""
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """Per sliding window: bool ``[n, 1, 1, slots]``, or ``None`` if all slots are seen."""


@dataclass(slots=True)
class _PrefillRow:
    """One prefill row: its tokens in the launch, its pages, and where it starts."""

    first: int
    length: int
    kv_length: int
    pages: torch.Tensor
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Plan:
    num_decode_rows: int
    decode: list[_DecodeGroup]
    prefill: list[_PrefillRow]


class TorchAttentionBackend(AttentionBackend):
    """The reference backend, created from an ``AttentionContext``."""

    def __init__(self, context: AttentionContext) -> None:
        self._pool = context.kv_pool
        self._page_size = context.page_size
        self._device = context.device

    def plan(self, batch: Batch, slot: int) -> _Plan:  # noqa: ARG002
        """Group the decode rows, list the prefill rows; masks are made when first needed."""
        num_decode = batch.num_decode_rows
        groups = [
            self._decode_group(batch, rows) for rows in _similar_lengths(batch.kv_lens[:num_decode])
        ]
        rows = []
        first = num_decode
        for row in range(num_decode, batch.num_rows):
            length, kv_length = int(batch.query_lens[row]), int(batch.kv_lens[row])
            columns = -(-kv_length // self._page_size)
            pages = batch.page_table[batch.rows[row], :columns].long()
            rows.append(_PrefillRow(first, length, kv_length, pages))
            first += length
        return _Plan(num_decode, groups, rows)

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        plan: _Plan,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend decode groups, then prefill rows; see the interface for shapes."""
        assert new_kv is None, "this backend reads from the pool only"
        k_pool, v_pool = self._pool.layer(layer.index)
        if not plan.prefill and len(plan.decode) == 1 and plan.decode[0].rows is None:
            return self._attend_group(q, layer, plan.decode[0], k_pool, v_pool)
        out = torch.empty_like(q)
        for group in plan.decode:
            rows = slice(0, plan.num_decode_rows) if group.rows is None else group.rows
            out[rows] = self._attend_group(q[rows], layer, group, k_pool, v_pool)
        for row in plan.prefill:
            tokens = slice(row.first, row.first + row.length)
            out[tokens] = self._attend_prefill(q[tokens], layer, row, k_pool, v_pool)
        return out

    def _decode_group(self, batch: Batch, members: npt.NDArray[np.int64] | None) -> _DecodeGroup:
        rows = None
        table_rows = batch.rows[: batch.num_decode_rows]
        lengths = batch.kv_lens[: batch.num_decode_rows]
        if members is not None:
            rows = torch.from_numpy(members).to(self._device)
            table_rows, lengths = table_rows[rows], lengths[members]
        columns = -(-int(lengths.max()) // self._page_size)
        pages = batch.page_table[table_rows, :columns].long()
        device_lengths = torch.from_numpy(lengths.astype(np.int64)).to(self._device)
        num_slots = columns * self._page_size
        unowned = self._unowned_slots(lengths, num_slots)
        if lengths.min() <= num_slots - self._page_size:
            # A shorter row repeats its first page, which holds numbers of its own.
            num_pages = -(-device_lengths // self._page_size)
            behind = torch.arange(columns, device=self._device) >= num_pages[:, None]
            pages = torch.where(behind, pages[:, :1], pages)
        return _DecodeGroup(rows, pages.flatten(), device_lengths, num_slots, unowned)

    def _unowned_slots(self, lengths: npt.NDArray[np.int32], num_slots: int) -> torch.Tensor | None:
        """Return the slots behind a row's last token, in its last page and in repetitions of it."""
        page = self._page_size
        filled = (lengths - 1) % page + 1
        if (filled == page).all():
            return None
        slots, last_pages = np.arange(num_slots), (lengths[:, None] - 1) // page
        # The first page, which shorter rows repeat, is the last one only if it is the only one.
        partial = (slots // page == last_pages) | (last_pages == 0)
        unowned = partial & (slots % page >= filled[:, None])
        return torch.from_numpy(np.flatnonzero(unowned)).to(self._device)

    def _attend_group(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        group: _DecodeGroup,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> torch.Tensor:
        n, kv_heads = q.shape[0], layer.num_kv_heads
        gathered = [pool.index_select(0, group.pages) for pool in (k_pool, v_pool)]
        if group.unowned is not None:
            # A mask does not hide what is not a number: 0 * NaN is NaN.
            for part in gathered:
                part.view(-1, kv_heads, layer.head_dim).index_fill_(0, group.unowned, 0)
        shape = (n, group.num_slots, kv_heads, layer.head_dim)
        k, v = (part.view(shape).transpose(1, 2) for part in gathered)
        if layer.sliding_window not in group.masks:
            group.masks[layer.sliding_window] = _decode_mask(group, layer.sliding_window)
        mask = group.masks[layer.sliding_window]
        # The query heads of one KV head become the "sequence": no head is ever repeated.
        grouped = q.view(n, kv_heads, -1, layer.head_dim)
        return _attention(grouped, k, v, mask, layer, causal=False).reshape(q.shape)

    def _attend_prefill(
        self,
        q: torch.Tensor,
        layer: AttentionLayerSpec,
        row: _PrefillRow,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> torch.Tensor:
        k, v = (
            pool.index_select(0, row.pages).flatten(0, 1)[: row.kv_length].transpose(0, 1)
            for pool in (k_pool, v_pool)
        )
        group_size = layer.num_q_heads // layer.num_kv_heads
        if group_size > 1:
            k, v = (x.repeat_interleave(group_size, dim=0) for x in (k, v))
        window = layer.sliding_window
        if window is not None and window >= row.kv_length:
            window = None
        causal = row.length == row.kv_length and window is None and layer.logit_soft_cap is None
        if not causal and window not in row.masks:
            row.masks[window] = _prefill_mask(row, window, q.device)
        mask = None if causal else row.masks[window]
        q = q.transpose(0, 1).unsqueeze(0)
        out = _attention(q, k.unsqueeze(0), v.unsqueeze(0), mask, layer, causal=causal)
        return out.squeeze(0).transpose(0, 1)


def _similar_lengths(lengths: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int64] | None]:
    """Split rows into groups of similar length; ``[None]`` if one group takes all, in order."""
    if not len(lengths):
        return []
    if lengths.max() <= _MAX_LENGTH_RATIO * lengths.min():
        return [None]
    order = np.argsort(lengths, kind="stable")
    groups: list[npt.NDArray[np.int64] | None] = []
    first = 0
    while first < len(order):
        limit = _MAX_LENGTH_RATIO * lengths[order[first]]
        last = int(np.searchsorted(lengths[order], limit, side="right"))
        groups.append(order[first:last])
        first = last
    return groups


def _decode_mask(group: _DecodeGroup, window: int | None) -> torch.Tensor | None:
    """Return what each row sees, bool ``[n, 1, 1, slots]``; ``None`` if that is everything."""
    slots = torch.arange(group.num_slots, device=group.pages.device)
    lengths = group.lengths[:, None]
    seen = slots < lengths
    if window is not None:
        seen &= slots >= lengths - window
    return None if bool(seen.all()) else seen[:, None, None, :]


def _prefill_mask(row: _PrefillRow, window: int | None, device: torch.device) -> torch.Tensor:
    """Return what each query token sees, bool ``[length, kv_length]``, causal from the end."""
    query = torch.arange(row.kv_length - row.length, row.kv_length, device=device)[:, None]
    key = torch.arange(row.kv_length, device=device)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return seen


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    layer: AttentionLayerSpec,
    *,
    causal: bool,
) -> torch.Tensor:
    if layer.logit_soft_cap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=layer.scale
        )
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * layer.scale
    scores = torch.tanh(scores / layer.logit_soft_cap) * layer.logit_soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
