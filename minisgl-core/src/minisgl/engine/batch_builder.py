"""From a launch plan to the tensors that a model wants: vectorised, no loop over tokens."""

import numpy as np
import torch

from minisgl.attention.batch import Batch
from minisgl.engine.plan import LaunchPlan
from minisgl.engine.row_state import RowState


def build_batch(launch: LaunchPlan, state: RowState, page_size: int) -> Batch:
    """Return the launch's ``Batch``; its K and V slots come from the rows' page tables."""
    device, num_decode = state.device, launch.num_decode_rows
    rows, starts, lens = (
        array.astype(np.int64) for array in (launch.rows, launch.starts, launch.query_lens)
    )
    if len(launch.token_ids):
        ends = np.cumsum(lens)
        token_rows = np.repeat(rows, lens)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
    else:
        ends, token_rows, positions = np.arange(1, len(rows) + 1), rows, starts
    pages = state.host_page_table[token_rows, positions // page_size].astype(np.int64)
    slots = pages * page_size + positions % page_size
    device_rows = torch.from_numpy(rows).to(device)
    prompt_ids = torch.from_numpy(launch.token_ids.astype(np.int64)).to(device)
    if num_decode == len(rows):
        input_ids = state.last_token[device_rows]
    elif num_decode:
        input_ids = torch.cat((state.last_token[device_rows[:num_decode]], prompt_ids))
    else:
        input_ids = prompt_ids
    every_token_sampled = bool(launch.sampled.all()) and len(positions) == len(rows)
    return Batch(
        input_ids=input_ids,
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        sample_indices=None
        if every_token_sampled
        else torch.from_numpy(ends[launch.sampled] - 1).to(device),
        rows=device_rows,
        num_decode_rows=num_decode,
        query_lens=launch.query_lens,
        kv_lens=launch.starts + launch.query_lens,
        page_table=state.page_table,
        host_page_table=state.host_page_table,
        page_size=page_size,
    )
