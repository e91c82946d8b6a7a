"""What a step sends to the detokenizer, collected as flat arrays."""

import numpy as np
import numpy.typing as npt

from minisgl.message import StreamStart, TokenBatch
from minisgl.request import FinishReason
from minisgl.scheduler.request_state import RequestState


class OutputCollector:
    """Gathers tokens and terminal events until ``take``."""

    def __init__(self) -> None:
        self._clear()

    def announce(self, request: RequestState) -> None:
        """Tell the detokenizer about a request before its first token or its end."""
        if not request.announced:
            request.announced = True
            self._started.append(
                StreamStart(
                    uid=request.uid,
                    num_prompt_tokens=request.num_prompt_tokens,
                    params=request.params,
                    num_cached_tokens=request.num_cached_tokens,
                    prompt_tail=request.prompt_tail,
                )
            )

    def add(self, uids: bytes, tokens: npt.NDArray[np.int32]) -> None:
        """Add one token for each uid, little-endian int64."""
        self._uids.append(uids)
        self._tokens.append(tokens.astype("<i4", copy=False).tobytes())

    def finish(self, request: RequestState) -> None:
        """Add the request's one terminal event, after its tokens."""
        assert request.terminal is not None
        self.announce(request)
        self._finished.append(request)

    def take(self) -> TokenBatch | None:
        """Return everything since the last call as one message; ``None`` if nothing happened."""
        if not (self._uids or self._finished or self._started):
            return None
        finished = self._finished
        batch = TokenBatch(
            started=self._started,
            uids=b"".join(self._uids),
            token_ids=b"".join(self._tokens),
            finished_uids=[request.uid for request in finished],
            finish_reasons=[str(request.terminal or FinishReason.ERROR) for request in finished],
            num_cached_tokens=[request.num_cached_tokens for request in finished],
            failures=[request.failure for request in finished],
        )
        self._clear()
        return batch

    def _clear(self) -> None:
        self._started: list[StreamStart] = []
        self._uids: list[bytes] = []
        self._tokens: list[bytes] = []
        self._finished: list[RequestState] = []
