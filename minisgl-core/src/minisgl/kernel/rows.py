"""Tensors that hold the state of all rows, and the torch references that change them.

A decode step begins with two operations: ``apply_plan`` writes what a packed plan changes, and
``advance_rows`` turns every decode row's state into the model's inputs. Both read only buffers at
fixed addresses, so that a CUDA graph can begin with them.
"""

from typing import NamedTuple

import torch

HEADER_WORDS = 10
"""Words before the first section of a packed plan; see ``minisgl.engine.plan_codec``."""

PARAM_WORDS = 8
"""Words of a row's parameters: row, one to spare, temperature, top_k, top_p, min_p, seed (two)."""

HAS_ORDER = 1
"""Flag of a packed plan: it brings the order of the decode rows."""


class RowTensors(NamedTuple):
    """State of every row; the last row is for padding: its length stays 0, its page is page 0.

    Attributes:
        page_table: int32 ``[rows, width]``.
        lengths: int64 ``[rows]``: tokens in the pool; every launch advances those of its rows.
        last_token: int64 ``[rows]``: the token that the next decode launch feeds.
        order: int64 ``[rows - 1]``: the decode rows in their order, then the padding row.
        temperature, top_p, min_p: float32 ``[rows]``.
        top_k, seed: int64 ``[rows]``.
    """

    page_table: torch.Tensor
    lengths: torch.Tensor
    last_token: torch.Tensor
    order: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor


class DecodeInputs(NamedTuple):
    """What a decode launch reads, one entry a row, in order.

    Attributes:
        input_ids, positions: int64 ``[R]``.
        slots: int64 ``[R]``: where K and V go; -1 for padding.
        kv_lens: int32 ``[R]``: tokens that attention sees, the new one included; 1 for padding.
        temperature: float32 ``[R]``.
        seed: int64 ``[R]``.
        places: int64 ``[R]``: place of the token to come in its sequence.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    places: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> "DecodeInputs":
        """Return zeroed inputs for ``num_rows`` rows."""
        i64, i32, f32 = torch.int64, torch.int32, torch.float32
        dtypes = (i64, i64, i64, i32, f32, i64, i64)
        return cls(*(torch.zeros(num_rows, dtype=dtype, device=device) for dtype in dtypes))

    def first(self, num_rows: int) -> "DecodeInputs":
        """Return views of the first ``num_rows``."""
        return DecodeInputs(*(tensor[:num_rows] for tensor in self))


def apply_plan(words: torch.Tensor, rows: RowTensors) -> None:
    """Write what a packed plan changes: added rows, pages, and the order if it brings one.

    The reference reads the header on the host, so it serves a CPU only.

    Args:
        words: int32, at least as many as the plan has; see ``minisgl.engine.plan_codec``.
        rows: changed.
    """
    flags, added, controls, writes, order = words[2:7].tolist()
    begin_controls = HEADER_WORDS + added * PARAM_WORDS
    begin_writes = begin_controls + controls
    begin_order = begin_writes + writes * 3
    if added:
        _add(words[HEADER_WORDS:begin_controls].view(-1, PARAM_WORDS), rows)
    if writes:
        table_rows, columns, pages = words[begin_writes:begin_order].view(-1, 3).unbind(1)
        rows.page_table[table_rows.long(), columns.long()] = pages
    if flags & HAS_ORDER:
        rows.order[:order] = words[begin_order : begin_order + order]
        rows.order[order:] = len(rows.lengths) - 1


def advance_rows(rows: RowTensors, inputs: DecodeInputs, page_size: int) -> None:
    """Fill the inputs of the first ``R`` rows of the order, and advance their lengths by one.

    Args:
        rows: lengths are changed, but that of the padding row.
        inputs: filled; their length is ``R``.
        page_size: tokens a page.
    """
    order = rows.order[: len(inputs.input_ids)]
    real = order != len(rows.lengths) - 1
    positions = rows.lengths[order]
    pages = rows.page_table[order, positions // page_size].long()
    inputs.input_ids.copy_(rows.last_token[order])
    inputs.positions.copy_(positions)
    inputs.slots.copy_(torch.where(real, pages * page_size + positions % page_size, -1))
    inputs.kv_lens.copy_(positions + 1)
    inputs.temperature.copy_(rows.temperature[order])
    inputs.seed.copy_(rows.seed[order])
    inputs.places.copy_(positions + 1)
    rows.lengths[order] = positions + real


def _add(added: torch.Tensor, rows: RowTensors) -> None:
    """Set the parameters of rows with a new owner, ``[n, PARAM_WORDS]`` words."""
    places = added[:, 0].long()
    rows.temperature[places] = added[:, 2].view(torch.float32)
    rows.top_k[places] = added[:, 3].long()
    rows.top_p[places] = added[:, 4].view(torch.float32)
    rows.min_p[places] = added[:, 5].view(torch.float32)
    low, high = added[:, 6].long() & 0xFFFFFFFF, added[:, 7].long()
    rows.seed[places] = high << 32 | low
