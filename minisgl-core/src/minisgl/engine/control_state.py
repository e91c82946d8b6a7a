"""What the device keeps of rows with controls: counts, masks, biases, banned sequences."""

from typing import Final

import numpy as np
import torch

from minisgl.engine.controls import RowControls, SectionSlices
from minisgl.kernel.controls import ControlTensors
from minisgl.request import (
    MAX_BAD_SEQUENCES,
    MAX_BAD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)

_PREFIX: Final = MAX_BAD_TOKENS - 1


def control_bytes(num_rows: int, vocab_size: int, num_eos: int) -> int:
    """Return the bytes that ``ControlState`` takes: about 4 for each row and token."""
    entries, words = _num_entries(num_eos), -(-vocab_size // 32)
    sequences = MAX_BAD_SEQUENCES * (_PREFIX + 1)
    return 4 * (num_rows + 1) * (vocab_size + words + 3 + 3 * entries + sequences + _PREFIX)


class ControlState:
    """Tensors of all rows, changed by records of rows with new owners and by sampled tokens.

    Attributes:
        tensors: the state; one more row than requests, for padding.

    Args:
        num_rows: requests at once.
        vocab_size: of the model.
        num_eos: end-of-sequence tokens of the model.
        device: where the tensors live.
    """

    def __init__(self, num_rows: int, vocab_size: int, num_eos: int, device: torch.device) -> None:
        count, words, entries = num_rows + 1, -(-vocab_size // 32), _num_entries(num_eos)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            if device.type == "cpu":
                # Not touched: what no row ever uses takes no memory.
                return torch.from_numpy(np.zeros(shape, dtype=str(dtype).removeprefix("torch.")))
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tensors = ControlTensors(
            counts=zeros(count, vocab_size),
            allowed=zeros(count, words),
            presence=zeros(count, dtype=torch.float32),
            frequency=zeros(count, dtype=torch.float32),
            repetition=zeros(count, dtype=torch.float32),
            bias_tokens=zeros(count, entries),
            bias_until=zeros(count, entries),
            bias_values=zeros(count, entries, dtype=torch.float32),
            bad_prefixes=zeros(count, MAX_BAD_SEQUENCES, _PREFIX),
            bad_lasts=zeros(count, MAX_BAD_SEQUENCES),
            recent=zeros(count, _PREFIX),
        )

    def set_row(self, record: RowControls, words: torch.Tensor, at: SectionSlices) -> None:
        """Give a row what its new owner asks for; all that the last one left is overwritten.

        Args:
            record: what it asks for.
            words: int32, on the device: the words that the record was read from.
            at: where its sections lie in them.

        Raises:
            ValueError: its bits of allowed tokens are not those of this vocabulary.
        """
        row, state = record.row, self.tensors
        num_words = state.allowed.shape[1]
        if len(record.allowed) not in (0, num_words):
            raise ValueError(
                f"row {row} brings {len(record.allowed)} words of allowed tokens, but the "
                f"vocabulary has {num_words}"
            )
        # Filled, not assigned: an assigned number travels to a GPU, and the host waits for it.
        state.presence[row].fill_(record.presence)
        state.frequency[row].fill_(record.frequency)
        state.repetition[row].fill_(record.repetition)
        entries, (sequences, length) = len(record.bias_tokens), record.bad_prefixes.shape
        state.bias_values[row].zero_()
        state.bias_tokens[row, :entries] = words[at.bias_tokens]
        state.bias_until[row, :entries] = words[at.bias_until]
        state.bias_values[row, :entries] = words[at.bias_values].view(torch.float32)
        state.bad_lasts[row].fill_(-1)
        state.bad_lasts[row, :sequences] = words[at.bad_lasts]
        if sequences:
            state.bad_prefixes[row].fill_(-1)
            prefixes = words[at.bad_prefixes].view(sequences, length)
            state.bad_prefixes[row, :sequences, _PREFIX - length :] = prefixes
        # A row that allows all tokens may be masked along with one that does not.
        if len(record.allowed):
            state.allowed[row] = words[at.allowed]
        else:
            state.allowed[row].fill_(-1)
        self._set_history(record, words, at)

    def _set_history(self, record: RowControls, words: torch.Tensor, at: SectionSlices) -> None:
        row, state = record.row, self.tensors
        output = words[at.output]
        state.recent[row].fill_(-1)
        num_recent = min(len(record.output), _PREFIX)
        if num_recent:
            state.recent[row, _PREFIX - num_recent :] = output[-num_recent:]
        if record.penalizes:
            counts = state.counts[row].zero_()
            if len(record.prompt) and record.repetition != 1:
                counts.index_fill_(0, words[at.prompt].long(), 1)
            counts.scatter_add_(0, output.long(), torch.full_like(output, 2))


def _num_entries(num_eos: int) -> int:
    """Return how many biases and bans a row can have."""
    return MAX_LOGIT_BIAS + MAX_BAD_SEQUENCES + MAX_STOP_TOKEN_IDS + num_eos
