"""Rows: the page table's host side and every per-row number, as arrays."""

import numpy as np

from minisgl.request import MAX_STOP_TOKEN_IDS
from minisgl.scheduler.request_state import RequestState


class TableManager:
    """Hands out rows and keeps what the scheduler knows about each, one array a fact.

    Steady-state work on all rows is vectorised over these arrays. ``launched`` is what scheduling
    reads; ``committed`` and ``num_tokens`` are what finishing, streaming and caching read.

    Attributes:
        tokens: int32 ``[rows, max_seq_len]``: prompt and committed output.
        num_tokens: int64 ``[rows]``: tokens known to the host.
        launched: int64 ``[rows]``: tokens whose K and V are stored once all launches have run.
        committed: int64 ``[rows]``: tokens whose K and V are stored by processed steps.
        end: int64 ``[rows]``: number of tokens at which the request ends by length.
        min_end: int64 ``[rows]``: number of tokens below which it must not stop.
        num_pages: int64 ``[rows]``: columns of the page table in use.
        pages: int32 ``[rows, width]``: the page table.
        last_step: int64 ``[rows]``: number of the last step that launched it; -1: none did.
        uids: int64 ``[rows]``.
        stop_ids: int32 ``[rows, n]``: the request's own stop tokens, padded with -1.
        num_stop_ids: int64 ``[rows]``: how many there are.
        ignore_eos: bool ``[rows]``.
        num_logprobs: int32 ``[rows]``: alternatives that the request wants reported with each of
            its tokens; -1: it wants nothing.
        live: bool ``[rows]``: the request has no terminal reason; new tokens count.
        requests: the owner of each row.

    Args:
        num_rows: requests at once.
        max_seq_len: most tokens of a request.
        page_size: tokens a page.
    """

    def __init__(self, num_rows: int, max_seq_len: int, page_size: int) -> None:
        width = -(-max_seq_len // page_size)
        self.tokens = np.zeros((num_rows, max_seq_len), dtype=np.int32)
        self.pages = np.zeros((num_rows, width), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.launched = np.zeros(num_rows, dtype=np.int64)
        self.committed = np.zeros(num_rows, dtype=np.int64)
        self.end = np.zeros(num_rows, dtype=np.int64)
        self.min_end = np.zeros(num_rows, dtype=np.int64)
        self.num_pages = np.zeros(num_rows, dtype=np.int64)
        self.last_step = np.zeros(num_rows, dtype=np.int64)
        self.uids = np.zeros(num_rows, dtype=np.int64)
        self.stop_ids = np.full((num_rows, MAX_STOP_TOKEN_IDS), -1, dtype=np.int32)
        self.num_stop_ids = np.zeros(num_rows, dtype=np.int64)
        self.ignore_eos = np.zeros(num_rows, dtype=np.bool_)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int32)
        self.live = np.zeros(num_rows, dtype=np.bool_)
        self.requests: list[RequestState | None] = [None] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows without an owner."""
        return len(self._free)

    def take(self, request: RequestState) -> int:
        """Give ``request`` a row and move its tokens there; its lengths start at 0."""
        row = self._free.pop()
        tokens = request.saved_tokens
        self.tokens[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.launched[row] = self.committed[row] = self.num_pages[row] = 0
        self.last_step[row] = -1
        self.end[row] = request.max_total_tokens
        self.min_end[row] = request.num_prompt_tokens + request.params.min_tokens
        self.uids[row] = request.uid
        self.num_stop_ids[row] = num_stops = len(request.stop_token_ids)
        self.stop_ids[row, :num_stops] = sorted(request.stop_token_ids)
        self.stop_ids[row, num_stops:] = -1
        self.ignore_eos[row] = request.params.ignore_eos
        wanted = request.params.logprobs
        self.num_logprobs[row] = -1 if wanted is None else wanted
        self.live[row] = True
        self.requests[row] = request
        request.row = row
        return row

    def give_back(self, request: RequestState) -> None:
        """Free the request's row; its tokens move back to it, for a later admission."""
        row = request.row
        assert self.requests[row] is request, "a row is given back once, by its owner"
        request.saved_tokens = self.tokens[row, : self.num_tokens[row]].copy()
        request.row = -1
        self.requests[row] = None
        self.live[row] = False
        self._free.append(row)

    def owner(self, row: int) -> RequestState:
        """Return the request that owns ``row``."""
        request = self.requests[row]
        assert request is not None, "the row has an owner"
        return request
