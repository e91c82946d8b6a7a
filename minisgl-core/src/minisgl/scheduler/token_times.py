"""When each output token came: kept only while somebody observes finished requests."""

import numpy as np
import numpy.typing as npt

from minisgl.scheduler.request_state import RequestState


class TokenTimes:
    """The time between each output token of a row and the one before it.

    One assignment a step writes the times of all its rows. A request's times follow it through
    retractions, and the wait for its new row counts as one of them: that is what its client sees.
    The arrays are as large as the table of tokens, but take memory only where they are written.

    Args:
        num_rows: rows of the page table.
        max_seq_len: most tokens of a request.
    """

    def __init__(self, num_rows: int, max_seq_len: int) -> None:
        # Seconds; the time before output token i is in column i - 1, and what is written for the
        # first token falls into the last column, which no request reaches.
        self._gaps = np.zeros((num_rows, max_seq_len), dtype=np.float32)
        self._last = np.zeros(num_rows, dtype=np.float64)
        self._num_prompt = np.zeros(num_rows, dtype=np.int64)

    def open(self, request: RequestState) -> None:
        """Begin or go on with a request that has just got its row."""
        row = request.row
        self._num_prompt[row] = request.num_prompt_tokens
        self._last[row] = request.last_token
        self._gaps[row, : len(request.saved_gaps)] = request.saved_gaps

    def record(
        self,
        rows: npt.NDArray[np.int64] | int,
        num_tokens: npt.NDArray[np.int64] | int,
        now: float,
    ) -> None:
        """Note one new token for each of ``rows``, distinct ones.

        Args:
            rows: int64 ``[R]``, or one row.
            num_tokens: int64 ``[R]``: prompt and output before the new token; or that of the row.
            now: seconds of a monotonic clock.
        """
        self._gaps[rows, num_tokens - self._num_prompt[rows] - 1] = now - self._last[rows]
        self._last[rows] = now

    def close(self, request: RequestState, num_output: int) -> None:
        """Save the times with a request that loses its row after ``num_output`` tokens."""
        request.saved_gaps = self._gaps[request.row, : max(num_output - 1, 0)].copy()
        request.last_token = float(self._last[request.row])

    def of(self, request: RequestState, num_output: int) -> tuple[float, ...]:
        """Return the times between the first ``num_output`` tokens, seconds."""
        gaps = self._gaps[request.row] if request.row >= 0 else request.saved_gaps
        return tuple(gaps[: max(num_output - 1, 0)].tolist())
