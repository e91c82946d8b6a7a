"""From a step's sampled tokens to committed state: what each request now has, and which end."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minisgl.engine.reports import StepReports
from minisgl.request import FinishReason
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeSet, RowArray
from minisgl.scheduler.launch import LaunchedStep
from minisgl.scheduler.output import OutputCollector
from minisgl.scheduler.request_state import RequestState
from minisgl.scheduler.table import TableManager
from minisgl.scheduler.token_times import TokenTimes

TokenArray = npt.NDArray[np.int32]
Ending = tuple[RequestState, FinishReason]

_MAX_COMPARED = 4
"""End-of-sequence tokens that are compared one by one; models have one to three."""


class Committer:
    """Writes tokens to the table, hands them to the detokenizer, shares finished chunks.

    Args:
        table: the rows.
        cache: takes over the whole pages of prompt chunks.
        output: collects what the detokenizer gets.
        vocab_size: of the model.
        eos_token_ids: tokens that end a text, unless the request ignores them.
        times: notes when each token came, if anybody wants to know.
    """

    def __init__(
        self,
        table: TableManager,
        cache: CacheManager,
        output: OutputCollector,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        times: TokenTimes | None = None,
    ) -> None:
        self._table = table
        self._cache = cache
        self._output = output
        self._times = times
        self._is_eos = np.zeros(vocab_size, dtype=np.bool_)
        self._is_eos[list(eos_token_ids)] = True
        self._eos = tuple(eos_token_ids)

    def commit(
        self, step: LaunchedStep, tokens: TokenArray, reports: StepReports, num_ended: int
    ) -> list[Ending]:
        """Commit a processed step.

        Args:
            step: the step.
            tokens: int32 ``[S]``: of its decode rows, then of its sampled chunks.
            reports: log-probabilities of those that want them.
            num_ended: requests that have ended by now.

        Returns:
            Requests that end with this step's token, and why.
        """
        num_decode = step.plan.num_decode_rows
        endings: list[Ending] = []
        if step.decode is not None:
            is_live = num_ended == step.num_ended
            if reports.sampled:
                self._report_decode(step.decode, reports, all_live=is_live)
            endings = self._commit_decode(step, step.decode, tokens[:num_decode], all_live=is_live)
        if step.chunks:
            for part in reports.prompts:
                self._table.owner(part.row).prompt_logprobs.append(part.arrays)
            if reports.sampled:
                self._report_chunks(step, reports)
            endings += self._commit_chunks(step, tokens[num_decode:].tolist())
        return endings

    def _report_decode(self, decode: DecodeSet, reports: StepReports, *, all_live: bool) -> None:
        """Hand on log-probabilities of decode rows, before their tokens."""
        table, rows = self._table, decode.rows
        live = table.live[rows]
        # Tokens of requests that have ended are dropped: those behind them move up.
        places = live.cumsum() - 1
        for report in reports.sampled:
            mine = report.places[report.places < len(rows)]
            arrays = report.arrays[: len(mine)]
            if not all_live:
                stays = live[mine]
                mine, arrays = mine[stays], arrays[stays]
            self._output.add_logprobs(places[mine], table.num_logprobs[rows[mine]], arrays)

    def _report_chunks(self, step: LaunchedStep, reports: StepReports) -> None:
        """Hand on log-probabilities of the tokens after last chunks, before these tokens."""
        first, table = step.plan.num_decode_rows, self._table
        sampled = [chunk.request for chunk in step.chunks if chunk.is_last]
        live = np.array([request.terminal is None for request in sampled], dtype=np.bool_)
        rows = np.array([request.row for request in sampled], dtype=np.int64)
        places = live.cumsum() - 1
        for report in reports.sampled:
            chosen = report.places >= first
            mine = report.places[chosen] - first
            stays = live[mine]
            mine, arrays = mine[stays], report.arrays[chosen][stays]
            self._output.add_logprobs(places[mine], table.num_logprobs[rows[mine]], arrays)

    def _commit_decode(
        self, step: LaunchedStep, decode: DecodeSet, tokens: TokenArray, *, all_live: bool
    ) -> list[Ending]:
        table, rows, ends, uids = self._table, decode.rows, step.ends, decode.uid_bytes
        places = self._ending_places(decode, tokens, step.last)
        endings = [(int(rows[place]), reason) for place, reason in sorted(places.items())]
        if not all_live:
            # Tokens of requests that have ended meanwhile were speculative: they are dropped. Nor
            # is anything cached of them: a step that they were computed from may have failed.
            live = table.live[rows]
            rows, ends, tokens = rows[live], ends[live], tokens[live]
            uids = decode.uids[live].astype("<i8").tobytes()
            endings = [(row, reason) for row, reason in endings if table.live[row]]
        table.tokens[rows, ends] = tokens
        table.committed[rows] = ends
        table.num_tokens[rows] = ends + 1
        if self._times is not None:
            self._times.record(rows, ends, time.monotonic())
        self._output.add(uids, tokens)
        return [(table.owner(row), reason) for row, reason in endings]

    def _ending_places(
        self, decode: DecodeSet, tokens: TokenArray, last: RowArray | None
    ) -> dict[int, FinishReason]:
        """Return the places of rows that end with their token, and why; a stop beats the length."""
        places: dict[int, FinishReason] = {}
        if last is not None:
            places.update(dict.fromkeys(last.tolist(), FinishReason.LENGTH))
        is_eos = self._which_end(tokens)
        if np.count_nonzero(is_eos):
            stopped = (is_eos & decode.obeys_eos).nonzero()[0]
            places.update(dict.fromkeys(stopped.tolist(), FinishReason.STOP))
        if len(decode.watched):
            hit = (tokens[decode.watched, None] == decode.stop_ids).any(axis=1)
            places.update(dict.fromkeys(decode.watched[hit].tolist(), FinishReason.STOP))
        return places

    def _which_end(self, tokens: TokenArray) -> npt.NDArray[np.bool_]:
        """Return which tokens are end-of-sequence tokens, bool of their shape."""
        if len(self._eos) > _MAX_COMPARED:
            return self._is_eos[tokens]
        # A comparison from end to end is faster than a look-up in a table of the vocabulary.
        found: npt.NDArray[np.bool_] = tokens == (self._eos[0] if self._eos else -1)
        for token in self._eos[1:]:
            found |= tokens == token
        return found

    def _commit_chunks(self, step: LaunchedStep, tokens: list[int]) -> list[Ending]:
        """Commit prompt chunks; ``tokens`` are those of the last chunks among them."""
        table, sampled = self._table, iter(tokens)
        uids, new_tokens, endings = [], [], []
        for chunk in step.chunks:
            request, row = chunk.request, chunk.request.row
            token = next(sampled) if chunk.is_last else None
            if request.terminal is not None:
                continue
            table.committed[row] = chunk.start + chunk.length
            if token is not None:
                end = int(table.num_tokens[row])
                table.tokens[row, end] = token
                table.num_tokens[row] = end + 1
                now = time.monotonic()
                if self._times is not None:
                    self._times.record(row, end, now)
                self._output.announce(request)
                if request.scores_prompt:
                    self._output.add_prompt_logprobs(request)
                request.first_token = request.first_token or now
                uids.append(request.uid)
                new_tokens.append(token)
                if reason := self._reason_to_end(request, token, end + 1):
                    endings.append((request, reason))
            if not request.retracting:
                self._cache.cache_prefix(request)
        if uids:
            self._output.add(
                np.array(uids, dtype="<i8").tobytes(), np.array(new_tokens, dtype=np.int32)
            )
        return endings

    def _reason_to_end(
        self, request: RequestState, token: int, num_tokens: int
    ) -> FinishReason | None:
        is_eos = bool(self._is_eos[token]) and not request.params.ignore_eos
        if is_eos or token in request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= request.max_total_tokens else None
