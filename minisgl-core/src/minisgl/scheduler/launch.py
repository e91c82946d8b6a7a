"""From chosen rows and chunks to a plan, and what is remembered of it until its result comes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.engine.controls import encode_controls
from minisgl.engine.plan import (
    CHUNK,
    NO_CHUNKS,
    NO_CONTROLS,
    NO_MASKS,
    NO_PARAMS,
    NO_TOKENS,
    ROW_PARAMS,
    BatchPlan,
    IntArray,
    ParamsArray,
)
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.controls import controls_of
from minisgl.scheduler.decode import DecodeManager, DecodeSet, RowArray
from minisgl.scheduler.interfaces import StepResult
from minisgl.scheduler.prefill import Chunk
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.sharing import PrefixSharing, SharedGroups
from minisgl.scheduler.table import TableManager


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step whose result is not processed yet.

    Attributes:
        plan: what was launched.
        decode: the decode rows that it launches, if any.
        ends: int64 ``[R]``: tokens of each decode row in the pool once the step has run.
        last: int64: places of decode rows whose last allowed token this is; ``None``: of none.
        chunks: the prompt chunks.
        num_ended: requests that had ended by then: if no more have, all rows are still live.
        masked: requests with a mask, and where their token is among those of the step.
        result: gives the tokens.
        host_s: host time spent on it so far, in seconds.
    """

    plan: BatchPlan
    decode: DecodeSet | None
    ends: RowArray
    last: RowArray | None
    chunks: Sequence[Chunk]
    num_ended: int
    masked: Sequence[tuple[RequestState, int]] = ()
    result: StepResult | None = None
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may come next for the masked rows of a step that get one.

    Attributes:
        decoding: requests of decode rows, the last ones in their order.
        sampled: requests whose last chunk the step computes.
        words: int32 ``[m, words]``: of the first, then of the others.
    """

    decoding: Sequence[RequestState]
    sampled: Sequence[RequestState]
    words: IntArray

    @property
    def rows(self) -> IntArray:
        """Their rows, int32 ``[m]``."""
        return np.array([r.row for r in (*self.decoding, *self.sampled)], dtype=np.int32)

    def places(self, num_decode: int, chunks: Sequence[Chunk]) -> list[tuple[RequestState, int]]:
        """Return each request, and the place of its token among those of the step.

        Args:
            num_decode: decode rows of the step.
            chunks: of the step, those that get a token first.
        """
        first = num_decode - len(self.decoding)
        found = [(request, first + place) for place, request in enumerate(self.decoding)]
        wanted = set(map(id, self.sampled))
        for place, chunk in enumerate(chunks):
            if id(chunk.request) in wanted:
                found.append((chunk.request, num_decode + place))
        return found


_NOTHING: tuple[None, RowArray, None] = (None, np.empty(0, dtype=np.int64), None)


class LaunchBuilder:
    """Builds plans, and advances the rows' launched lengths.

    Args:
        table: the rows.
        cache: gives chunks their pages; decode rows have theirs already.
        decode: the decode rows.
        vocab_size: of the model.
        eos_token_ids: banned while a request has fewer than its ``min_tokens``.
        sharing: finds decode rows that share a prefix.
        mixed: one launch for decode rows and chunks, instead of two.
    """

    def __init__(
        self,
        table: TableManager,
        cache: CacheManager,
        decode: DecodeManager,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        sharing: PrefixSharing,
        mixed: bool,
    ) -> None:
        self._table = table
        self._cache = cache
        self._decode = decode
        self._sharing = sharing
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._mixed = mixed
        self._num_plans = 0
        self._sent: DecodeSet | None = None
        self._sent_groups: SharedGroups | None = None

    def build(
        self,
        added: Sequence[RequestState],
        chunks: Sequence[Chunk],
        *,
        run_decode: bool,
        num_ended: int,
        masks: Masks | None = None,
    ) -> LaunchedStep:
        """Return the step that feeds all decode rows, if ``run_decode``, and ``chunks``.

        Rows whose last chunk this is join the decode rows, for the next step. ``masks`` are those
        of all masked rows among them that get a token.
        """
        number = self._num_plans
        self._num_plans += 1
        order = self._decode.current()
        decode, ends, last = _NOTHING
        if run_decode and len(order.rows):
            decode, ends, last = self._decode.launch(number)
        params, controls = self._params(added) if added else (NO_PARAMS, NO_CONTROLS)
        if added:
            self._sharing.forget(params["row"])
        groups = self._sharing.of(order, self._cache.num_inserts)
        # Without groups there are those of the last plan, unless it says the order anew.
        says_order = order is not self._sent or (groups is None and self._sent_groups is not None)
        says_groups = groups is not None and (says_order or groups is not self._sent_groups)
        chunk_params, token_ids = (
            self._launch_chunks(chunks, number) if chunks else (NO_CHUNKS, NO_TOKENS)
        )
        plan = BatchPlan(
            number=number,
            added=params,
            controls=controls,
            table_writes=self._cache.take_writes(),
            decode_rows=order.rows32 if says_order else None,
            shared_groups=groups.group_of if groups and says_groups else NO_TOKENS,
            shared_tokens=groups.tokens if groups and says_groups else NO_TOKENS,
            num_decode_rows=len(ends),
            chunks=chunk_params,
            token_ids=token_ids,
            mixed=self._mixed,
            mask_rows=NO_TOKENS if masks is None else masks.rows,
            masks=NO_MASKS if masks is None else masks.words,
        )
        self._sent, self._sent_groups = order, groups
        step = LaunchedStep(
            plan=plan, decode=decode, ends=ends, last=last, chunks=chunks, num_ended=num_ended
        )
        if masks is not None:
            step.masked = masks.places(len(ends), chunks)
        return step

    def _launch_chunks(self, chunks: Sequence[Chunk], number: int) -> tuple[ParamsArray, IntArray]:
        """Give chunks their pages and advance their rows; returns ``CHUNK`` and their tokens."""
        table = self._table
        params = np.zeros(len(chunks), dtype=CHUNK)
        tokens = []
        for place, chunk in enumerate(chunks):
            row, end = chunk.request.row, chunk.start + chunk.length
            self._cache.extend(row, end)
            table.launched[row] = end
            table.last_step[row] = number
            params[place] = (row, chunk.start, chunk.length, chunk.is_last)
            tokens.append(table.tokens[row, chunk.start : end])
            if chunk.is_last:
                self._decode.add(row, masked=chunk.request.grammar is not None)
        return params, np.concatenate(tokens)

    def _params(self, added: Sequence[RequestState]) -> tuple[ParamsArray, IntArray]:
        """Return ``ROW_PARAMS`` of rows with a new owner, and what they ask for beyond these."""
        params = np.zeros(len(added), dtype=ROW_PARAMS)
        records = []
        for place, request in enumerate(added):
            asked, row, table = request.params, request.row, self._table
            temperature = 0.0 if asked.is_greedy else asked.temperature
            params[place] = (
                row, 0, temperature, max(asked.top_k, 0), asked.top_p, asked.min_p, request.seed
            )  # fmt: skip
            record = controls_of(
                request,
                table.tokens[row, : table.num_tokens[row]],
                min_end=int(table.min_end[row]),
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos,
            )
            if record is not None:
                records.append(record)
        return params, encode_controls(records)
