"""From a launch to the tensors that a model wants: on the device, no loop over rows or tokens."""

import numpy as np
import torch

from minisgl.attention.batch import Batch
from minisgl.engine.host_mirror import Launch
from minisgl.engine.row_state import DeviceChunks, RowState


def build_batch(launch: Launch, chunks: DeviceChunks, state: RowState) -> Batch:
    """Return the launch's ``Batch``, and advance the lengths of its rows.

    Decode rows feed their last token at their length; chunks bring their own tokens.
    """
    parts = []
    if launch.num_decode_rows:
        parts.append(_decode_tokens(state))
    if launch.num_prefill_tokens:
        parts.append(_prefill_tokens(launch.num_prefill_tokens, chunks, state))
    rows, input_ids, token_rows, positions = (
        pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*parts, strict=True)
    )
    sample_indices = None
    if launch.sampled is not None or launch.num_prefill_tokens:
        last = np.cumsum(launch.query_lens) - 1
        if launch.sampled is not None:
            last = last[launch.sampled]
        sample_indices = torch.from_numpy(last).to(state.device, non_blocking=True)
    return Batch(
        input_ids=input_ids,
        positions=positions,
        slots=state.slots(token_rows, positions),
        sample_indices=sample_indices,
        rows=rows,
        num_decode_rows=launch.num_decode_rows,
        query_lens=launch.query_lens.astype(np.int32),
        kv_lens=launch.ends.astype(np.int32),
        kv_lens_device=state.lengths[rows].int(),
        page_table=state.page_table,
        page_size=state.page_size,
    )


_Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows, and of each token: its id, its row and its position."""


def _decode_tokens(state: RowState) -> _Tokens:
    rows = state.decode_rows
    positions = state.lengths[rows]
    state.lengths[rows] = positions + 1
    return rows, state.last_token[rows], rows, positions


def _prefill_tokens(num_tokens: int, chunks: DeviceChunks, state: RowState) -> _Tokens:
    rows, starts, lengths = chunks.rows, chunks.starts, chunks.lengths
    ends = lengths.cumsum(0)
    chunk_of = torch.repeat_interleave(lengths, output_size=num_tokens)
    positions = torch.arange(num_tokens, device=state.device) + (starts - ends + lengths)[chunk_of]
    state.lengths[rows] = starts + lengths
    return rows, chunks.token_ids.long(), rows[chunk_of], positions
