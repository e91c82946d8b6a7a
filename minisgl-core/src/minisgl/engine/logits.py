"""Between the model and the sampler: what makes some rows' tokens impossible, or less likely.

One object an engine. ``receive`` takes a plan's records of rows with new owners; ``change`` returns
other logits for the rows that ask for them before the draw, ``accept`` takes note of what was drawn
and reports log-probabilities. All other rows are drawn from the model's own logits, as if no other
row asked for anything: on a GPU by a recorded decode step, after which the rows that ``concerns``
names are drawn again.

Order: allowed tokens, biases and bans, banned sequences, penalties; then, in the sampler,
temperature and filters. Log-probabilities are of the logits before all of these.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from minisgl.engine.control_state import ControlState
from minisgl.engine.controls import RowControls, decode_controls
from minisgl.engine.device_reports import DeviceReports, ScoredChunk
from minisgl.engine.host_mirror import Launch, RowArray
from minisgl.engine.info import EngineInfo
from minisgl.engine.plan import BatchPlan, IntArray
from minisgl.engine.staging import upload
from minisgl.kernel.controls import TokenLogprobs, note_tokens
from minisgl.kernel.ops import OpTable

_BIASES, _ALLOWED, _SEQUENCES, _PENALTIES, _LOGPROBS = 1, 2, 4, 8, 16
_CHANGES: Final = _BIASES | _ALLOWED | _SEQUENCES | _PENALTIES
_REMEMBERS: Final = _SEQUENCES | _PENALTIES

_PIECE: Final = 1 << 24
"""Logits that are worked on at once, so that intermediate results stay small: 64 MiB each."""

_ROWS: Final = 16
"""Pieces are of a multiple of so many rows, and so begin where accesses of 16 bytes may, as the
first does: for memory that begins elsewhere a kernel would be compiled while a request waits."""


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """Rows of one launch that get a token.

    Attributes:
        rows: int64 ``[S]`` on the device.
        lengths: int64 ``[S]`` on the device: tokens of each row, without the one to come.
        host_rows: int64 ``[S]``: the rows on the host.
        ends: int64 ``[S]``: the lengths on the host.
        places: int64 ``[S]``: which of the step's tokens they get.
        logits: of rows that report log-probabilities, before anything has changed them.
        reported: int64: places of those among the ``S`` rows.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    host_rows: RowArray
    ends: RowArray
    places: RowArray
    logits: torch.Tensor | None = None
    reported: RowArray | None = None


@dataclass(frozen=True, slots=True)
class ChangedLogits:
    """What the rows that ask for changes are drawn from.

    Attributes:
        places: int64 ``[C]``: which of the launch's sampled rows they are.
        on_device: int64 ``[C]``: the same on the device.
        logits: float32 ``[C, vocab]``.
    """

    places: RowArray
    on_device: torch.Tensor
    logits: torch.Tensor


class LogitsProcessing:
    """The steps between logits and the draw, over the state of all rows.

    Args:
        info: the engine's facts.
        device: where the logits are.
        ops: the operations on them.
    """

    def __init__(self, info: EngineInfo, device: torch.device, ops: OpTable) -> None:
        num_rows = info.max_running_requests
        self._state = ControlState(num_rows, info.vocab_size, len(info.eos_token_ids), device)
        self._ops = ops
        self._upload = partial(upload, device=device)
        self._piece = max(_ROWS, _PIECE // info.vocab_size // _ROWS * _ROWS)
        self._flags = np.zeros(num_rows + 1, dtype=np.uint8)
        self._until = np.zeros(num_rows + 1, dtype=np.int64)
        # Number of biases, of sequences, their length, and alternatives to report.
        self._sizes = np.zeros((num_rows + 1, 4), dtype=np.int64)
        self._prompts: dict[int, tuple[int, IntArray]] = {}
        self._controlled: set[int] = set()
        self._steady: set[int] = set()
        self._decoding: set[int] = set()
        self._reports: DeviceReports | None = None

    def receive(self, plan: BatchPlan, words: torch.Tensor) -> None:
        """Take over what rows with new owners ask for.

        Args:
            plan: as the host reads it.
            words: int32: its ``controls`` on the device.
        """
        if not self._controlled and not len(plan.controls):
            return
        if len(plan.added):
            self._add(plan, words)
        if plan.decode_rows is not None:
            # A row that has left the order for good costs no later step anything.
            decoding = self._steady.intersection(plan.decode_rows.tolist())
            self._forget(self._decoding - decoding)
            self._decoding = decoding

    def _add(self, plan: BatchPlan, words: torch.Tensor) -> None:
        """Take over new owners, with what they ask for."""
        self._forget(self._controlled.intersection(plan.added["row"].tolist()))
        for record, at in decode_controls(plan.controls):
            self._note(record)
            self._state.set_row(record, words, at)

    def _forget(self, rows: set[int]) -> None:
        """Forget rows whose owners are gone; what the device keeps of them is never looked at."""
        for row in rows:
            self._flags[row] = 0
            self._until[row] = 0
            self._prompts.pop(row, None)
        self._controlled -= rows
        self._steady -= rows
        self._decoding -= rows

    def reset(self) -> None:
        """Forget all rows, and what has been reported."""
        self._forget(self._controlled.copy())
        self._reports = None

    def concerns(self, rows: RowArray, ends: RowArray) -> npt.NDArray[np.bool_] | None:
        """Return which rows' logits change or are reported, bool ``[S]``; ``None``: no row's.

        Args:
            rows: int64 ``[S]``, host.
            ends: int64 ``[S]``: their lengths.
        """
        return self._active(rows, ends) > 0 if self._controlled else None

    def change(self, logits: torch.Tensor, sampled: SampledRows) -> ChangedLogits | None:
        """Return the logits of the rows that ask for changes; ``None``: no row does.

        Args:
            logits: ``[S, vocab]``; may be written to if they are float32 and all rows ask.
            sampled: takes a copy of what is to be reported.
        """
        if not self._controlled:
            return None
        flags = self._active(sampled.host_rows, sampled.ends)
        changed = (flags & _CHANGES).nonzero()[0]
        reported = (flags & _LOGPROBS).nonzero()[0]
        if len(reported):
            sampled.reported = reported
            sampled.logits = logits[self._upload(reported)]
        if not len(changed):
            return None
        places, rows, lengths = self._upload(changed), sampled.rows, sampled.lengths
        if len(changed) < len(flags):
            logits, rows, lengths = logits[places], rows[places], lengths[places]
        logits = logits.float()
        self._change(logits, rows, lengths, sampled.host_rows[changed], flags[changed])
        return ChangedLogits(changed, places, logits)

    def accept(self, tokens: torch.Tensor, sampled: SampledRows) -> None:
        """Take note of the tokens drawn, int64 ``[S]`` on the device."""
        if not self._controlled:
            return
        remembered = (self._flags[sampled.host_rows] & _REMEMBERS).nonzero()[0]
        if len(remembered):
            places = self._upload(remembered)
            note_tokens(sampled.rows[places], tokens[places], self._state.tensors)
        if sampled.logits is not None and sampled.reported is not None:
            num_top = int(self._sizes[sampled.host_rows[sampled.reported], 3].max())
            chosen = tokens[self._upload(sampled.reported)]
            logprobs = self._logprobs(sampled.logits, chosen, num_top)
            self._reported().sampled.append((sampled.places[sampled.reported], logprobs))

    def scored(self, launch: Launch) -> tuple[list[ScoredChunk], RowArray]:
        """Return the launch's chunks whose tokens are reported, and what predicts these.

        The second is int64: places among the tokens that the launch feeds.
        """
        chunks: list[ScoredChunk] = []
        indices: list[RowArray] = []
        if self._prompts and launch.num_prefill_tokens:
            firsts = launch.query_lens.cumsum() - launch.query_lens
            for place in range(launch.num_decode_rows, len(launch.rows)):
                row, end = int(launch.rows[place]), int(launch.ends[place])
                if row not in self._prompts:
                    continue
                start = end - int(launch.query_lens[place])
                num_tokens = min(end, len(self._prompts[row][1]) - 1) - start
                if num_tokens > 0:
                    chunks.append(ScoredChunk(row, start + 1, num_tokens))
                    indices.append(firsts[place] + np.arange(num_tokens))
        return chunks, np.concatenate(indices) if indices else np.empty(0, dtype=np.int64)

    def score(self, logits: torch.Tensor, chunks: list[ScoredChunk]) -> None:
        """Report log-probabilities of prompt tokens.

        Args:
            logits: ``[n, vocab]``, those that predict the chunks' tokens.
            chunks: as ``scored`` has returned them.
        """
        tokens = np.concatenate(
            [self._prompts[x.row][1][x.start : x.start + x.num_tokens] for x in chunks]
        )
        num_top = max(self._prompts[chunk.row][0] for chunk in chunks)
        on_device = self._upload(tokens.astype(np.int64))
        self._reported().prompts.append((chunks, self._logprobs(logits, on_device, num_top)))

    def take_reports(self) -> DeviceReports | None:
        """Return what has been reported since the last call; ``None`` if nothing has."""
        taken, self._reports = self._reports, None
        return taken

    def _reported(self) -> DeviceReports:
        """Return where this step's launches put what they report."""
        if self._reports is None:
            self._reports = DeviceReports()
        return self._reports

    def _note(self, record: RowControls) -> None:
        """Take a record over into what the host knows."""
        row = record.row
        flags = _LOGPROBS if record.logprobs >= 0 else 0
        flags |= _BIASES if len(record.bias_tokens) else 0
        flags |= _ALLOWED if len(record.allowed) else 0
        flags |= _SEQUENCES if len(record.bad_lasts) else 0
        flags |= _PENALTIES if record.penalizes else 0
        sequences, length = record.bad_prefixes.shape
        self._flags[row] = flags
        self._until[row] = record.until
        self._sizes[row] = (len(record.bias_tokens), sequences, length, max(record.logprobs, 0))
        if record.prompt_logprobs >= 0:
            self._prompts[row] = (record.prompt_logprobs, record.prompt.copy())
        self._controlled.add(row)
        if not record.comes_and_goes:
            self._steady.add(row)

    def _active(self, rows: RowArray, ends: RowArray) -> npt.NDArray[np.uint8]:
        """Return the flags of rows, without changes that have ended, uint8 ``[S]``."""
        flags = self._flags[rows]
        return np.where(ends < self._until[rows], flags, flags & _LOGPROBS)

    def _change(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        host_rows: RowArray,
        flags: npt.NDArray[np.uint8],
    ) -> None:
        """Change float32 logits ``[S, vocab]`` of rows of which each asks for something.

        What only some of them ask for changes nothing of the others.
        """
        ops, state = self._ops, self._state.tensors
        wanted = int(np.bitwise_or.reduce(flags))
        entries, sequences, length, _ = self._sizes[host_rows].max(axis=0).tolist()
        for some in _pieces(len(host_rows), self._piece):
            part, of_rows = logits[some], rows[some]
            if wanted & _ALLOWED:
                ops.mask_logits(part, of_rows, state)
            if wanted & _BIASES:
                ops.bias_logits(part, of_rows, lengths[some], state, entries)
            if wanted & _SEQUENCES:
                ops.ban_sequences(part, of_rows, state, sequences, length)
            if wanted & _PENALTIES:
                ops.penalize(part, of_rows, state)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenLogprobs:
        """Return log-probabilities ``[n]``, computed in pieces."""
        pieces = [
            self._ops.token_logprobs(logits[some], tokens[some], num_top)
            for some in _pieces(len(tokens), self._piece)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return TokenLogprobs(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _pieces(num: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` that cover ``num`` entries; one of nothing for none."""
    for first in range(0, max(num, 1), size):
        yield slice(first, first + size)
