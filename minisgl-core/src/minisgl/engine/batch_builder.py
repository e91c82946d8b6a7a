"""From a launch to the tensors that a model wants: on the device, no loop over rows or tokens."""

import numpy as np
import torch

from minisgl.attention.batch import Batch
from minisgl.engine.host_mirror import Launch
from minisgl.engine.row_state import DeviceChunks, RowState
from minisgl.kernel.rows import DecodeInputs


def build_batch(
    launch: Launch, chunks: DeviceChunks, state: RowState, *, shares: bool = False
) -> Batch:
    """Return the launch's ``Batch``, and advance the lengths of its rows.

    Decode rows feed their last token at their length; chunks bring their own tokens. With
    ``shares``, decode rows share prefixes as the row state says.
    """
    parts = []
    if launch.num_decode_rows:
        parts.append(_decode_tokens(state))
    if launch.num_prefill_tokens:
        parts.append(_prefill_tokens(launch.num_prefill_tokens, chunks, state))
    rows, input_ids, positions, slots, query_lens = (
        pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*parts, strict=True)
    )
    sample_indices = None
    if launch.num_prefill_tokens:
        sample_indices = query_lens.cumsum(0)[: launch.num_sampled] - 1
    return Batch(
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        sample_indices=sample_indices,
        rows=rows,
        num_decode_rows=launch.num_decode_rows,
        query_lens=launch.query_lens.astype(np.int32),
        kv_lens=launch.ends.astype(np.int32),
        kv_lens_device=state.rows.lengths[rows].int(),
        page_table=state.rows.page_table,
        page_size=state.page_size,
        shared=state.shared if shares and not launch.num_prefill_tokens else None,
    )


_Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows; of each token its id, position and slot; of each row its number of tokens."""


def _decode_tokens(state: RowState) -> _Tokens:
    rows = state.decode_rows
    inputs = DecodeInputs.allocate(len(rows), state.device)
    state.ops.advance_rows(state.rows, inputs, state.page_size)
    return rows, inputs.input_ids, inputs.positions, inputs.slots, torch.ones_like(rows)


def _prefill_tokens(num_tokens: int, chunks: DeviceChunks, state: RowState) -> _Tokens:
    rows, starts, lengths = chunks.rows, chunks.starts, chunks.lengths
    ends = lengths.cumsum(0)
    chunk_of = torch.repeat_interleave(lengths, output_size=num_tokens)
    positions = torch.arange(num_tokens, device=state.device) + (starts - ends + lengths)[chunk_of]
    state.rows.lengths[rows] = starts + lengths
    slots = state.slots(rows[chunk_of], positions)
    return rows, chunks.token_ids.long(), positions, slots, lengths
