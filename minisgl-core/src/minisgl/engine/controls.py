"""What a row with a new owner asks about its tokens beyond sampling, as plain packed data.

Only rows that ask for anything have a record: a header of ``HEADER_WORDS`` words, then sections.
Records travel inside the plan, so every rank has them, and a device finds each section in the
words of the plan, without a copy of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from minisgl.request import MAX_LOGPROBS

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

NO_INTS: IntArray = np.empty(0, dtype=np.int32)
_NO_FLOATS: FloatArray = np.empty(0, dtype=np.float32)
_NO_PREFIXES: IntArray = np.empty((0, 0), dtype=np.int32)

FOREVER: Final = 2**31 - 1

_HEADER = np.dtype(
    [
        ("row", np.int32),
        ("words", np.int32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("logprobs", np.int32),
        ("prompt_logprobs", np.int32),
        ("entries", np.int32),
        ("sequences", np.int32),
        ("length", np.int32),
        ("allowed", np.int32),
        ("prompt", np.int32),
        ("output", np.int32),
        ("comes_and_goes", np.int32),
    ]
)
HEADER_WORDS: Final = _HEADER.itemsize // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowControls:
    """What one row asks for.

    Attributes:
        row: of the table.
        presence, frequency, repetition: penalties; 0, 0 and 1 change nothing.
        logprobs: alternatives to report with each token; -1 reports nothing.
        prompt_logprobs: the same for the prompt's tokens, all of which this row computes.
        bias_tokens, bias_until: int32 ``[n]``: a bias counts while the row has fewer tokens than
            ``until`` (``FOREVER``: always).
        bias_values: float32 ``[n]``; -inf bans the token.
        bad_prefixes: int32 ``[m, length]``: tokens before the last one of each banned sequence,
            ending at the right, with -1 before them.
        bad_lasts: int32 ``[m]``: the last tokens.
        allowed: int32 ``[ceil(vocab / 32)]``: a bit a token; empty allows all.
        prompt: int32: the prompt's tokens, if a penalty or ``prompt_logprobs`` wants them.
        output: int32: the tokens generated so far, or those of them that matter.
        comes_and_goes: the row sits out decode launches now and then, as rows with masks do.
    """

    row: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    logprobs: int = -1
    prompt_logprobs: int = -1
    bias_tokens: IntArray = field(default_factory=lambda: NO_INTS)
    bias_until: IntArray = field(default_factory=lambda: NO_INTS)
    bias_values: FloatArray = field(default_factory=lambda: _NO_FLOATS)
    bad_prefixes: IntArray = field(default_factory=lambda: _NO_PREFIXES)
    bad_lasts: IntArray = field(default_factory=lambda: NO_INTS)
    allowed: IntArray = field(default_factory=lambda: NO_INTS)
    prompt: IntArray = field(default_factory=lambda: NO_INTS)
    output: IntArray = field(default_factory=lambda: NO_INTS)
    comes_and_goes: bool = False

    @property
    def penalizes(self) -> bool:
        """Whether a penalty changes anything."""
        return (self.presence, self.frequency, self.repetition) != (0, 0, 1)

    @property
    def until(self) -> int:
        """Number of tokens from which on the row's logits are left alone."""
        lasting = self.penalizes or len(self.bad_lasts) or len(self.allowed)
        return FOREVER if lasting else int(self.bias_until.max(initial=0))

    def sections(self) -> tuple[IntArray, ...]:
        """Return the record's sections, flat, in their order."""
        return (
            self.bias_tokens,
            self.bias_until,
            self.bias_values.view(np.int32),
            self.bad_prefixes.reshape(-1),
            self.bad_lasts,
            self.allowed,
            self.prompt,
            self.output,
        )


@dataclass(frozen=True, slots=True)
class SectionSlices:
    """Where the sections of a record lie in the words, in the order of ``RowControls.sections``."""

    bias_tokens: slice
    bias_until: slice
    bias_values: slice
    bad_prefixes: slice
    bad_lasts: slice
    allowed: slice
    prompt: slice
    output: slice


def encode_controls(records: Sequence[RowControls]) -> IntArray:
    """Return the records one after the other, int32."""
    pieces: list[IntArray] = []
    for record in records:
        sections = record.sections()
        header = np.zeros(1, dtype=_HEADER)
        header[0] = (
            record.row, HEADER_WORDS + sum(map(len, sections)), record.presence,
            record.frequency, record.repetition, record.logprobs, record.prompt_logprobs,
            len(record.bias_tokens), len(record.bad_lasts), record.bad_prefixes.shape[1],
            len(record.allowed), len(record.prompt), len(record.output), record.comes_and_goes,
        )  # fmt: skip
        pieces += [header.view(np.int32), *sections]
    return np.concatenate(pieces) if pieces else NO_INTS


def decode_controls(words: IntArray) -> Iterator[tuple[RowControls, SectionSlices]]:
    """Yield the records in ``words``, and where their sections lie; arrays are views of them."""
    first = 0
    while first < len(words):
        header = words[first : first + HEADER_WORDS].view(_HEADER)[0]
        entries, sequences, length = (int(header[x]) for x in ("entries", "sequences", "length"))
        at, slices = first + HEADER_WORDS, []
        others = (int(header[name]) for name in ("allowed", "prompt", "output"))
        for size in (entries, entries, entries, sequences * length, sequences, *others):
            slices.append(slice(at, at + size))
            at += size
        where = SectionSlices(*slices)
        yield (
            RowControls(
                row=int(header["row"]),
                presence=float(header["presence"]),
                frequency=float(header["frequency"]),
                repetition=float(header["repetition"]),
                logprobs=int(header["logprobs"]),
                prompt_logprobs=int(header["prompt_logprobs"]),
                bias_tokens=words[where.bias_tokens],
                bias_until=words[where.bias_until],
                bias_values=words[where.bias_values].view(np.float32),
                bad_prefixes=words[where.bad_prefixes].reshape(sequences, length),
                bad_lasts=words[where.bad_lasts],
                allowed=words[where.allowed],
                prompt=words[where.prompt],
                output=words[where.output],
                comes_and_goes=bool(header["comes_and_goes"]),
            ),
            where,
        )
        assert at == first + int(header["words"]), "a record is as long as it says"
        first = at


def rehearsal_of(lengths: Sequence[int], vocab_size: int, max_scored: int) -> IntArray:
    """Return packed records of rows 0, 1, ... that ask for everything at once.

    Args:
        lengths: tokens of each row's prompt.
        vocab_size: of the model.
        max_scored: prompt tokens with log-probabilities, all rows together; rows get theirs in
            turn, as long as whole prompts fit.
    """
    one, ban = np.zeros(1, dtype=np.int32), np.full(1, -np.inf, dtype=np.float32)
    records = []
    for row, length in enumerate(lengths):
        scored = max_scored >= length > 1
        max_scored -= length if scored else 0
        records.append(
            RowControls(
                row=row,
                presence=0.5,
                frequency=0.5,
                repetition=1.5,
                logprobs=MAX_LOGPROBS,
                prompt_logprobs=MAX_LOGPROBS if scored else -1,
                bias_tokens=one,
                bias_until=np.full(1, FOREVER, dtype=np.int32),
                bias_values=ban,
                bad_prefixes=one.reshape(1, 1),
                bad_lasts=one,
                allowed=np.full(-(-vocab_size // 32), -1, dtype=np.int32),
                prompt=np.zeros(length, dtype=np.int32),
                output=one,
            )
        )
    return encode_controls(records)
