"""What a step sends to the detokenizer, collected as flat arrays."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from minisgl.engine.reports import LogprobArrays
from minisgl.message import LogprobBatch, PromptLogprobs, StreamStart, TokenBatch
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
            params = request.params
            wants_prompt = params.return_prompt or params.prompt_logprobs is not None
            prompt = request.saved_tokens[: request.num_prompt_tokens]
            self._started.append(
                StreamStart(
                    uid=request.uid,
                    num_prompt_tokens=request.num_prompt_tokens,
                    params=request.params,
                    num_cached_tokens=request.num_cached_tokens,
                    prompt_token_ids=_little_endian(prompt) if wants_prompt else b"",
                    prompt_tail=request.prompt_tail,
                )
            )

    def add_prompt_logprobs(self, request: RequestState) -> None:
        """Add the log-probabilities of a complete prompt, before its first token."""
        num_top = request.params.prompt_logprobs or 0
        parts = [
            _packed(np.arange(len(part.chosen)), np.full(len(part.chosen), num_top), part)
            for part in request.prompt_logprobs
        ]
        whole = LogprobBatch(
            _little_endian(np.arange(request.num_prompt_tokens - 1)),
            *(b"".join(getattr(one, name) for one in parts) for name in _VALUES),
        )
        self._prompts.append(PromptLogprobs(request.uid, whole))
        request.scored = True
        request.prompt_logprobs.clear()

    def add_logprobs(
        self,
        places: npt.NDArray[np.int64],
        num_top: npt.NDArray[np.int32],
        arrays: LogprobArrays,
    ) -> None:
        """Add log-probabilities of tokens that the next ``add`` will bring.

        Args:
            places: int64 ``[n]``, ascending: which of those tokens.
            num_top: int32 ``[n]``: alternatives that each wants.
            arrays: of the ``n`` tokens.
        """
        if len(places):
            self._logprobs.append(_packed(places + self._num_tokens, num_top, arrays))

    def add(self, uids: bytes, tokens: npt.NDArray[np.int32]) -> None:
        """Add one token for each uid, little-endian int64."""
        self._num_tokens += len(tokens)
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
            logprobs=_joined(self._logprobs) if self._logprobs else None,
            prompt_logprobs=self._prompts,
        )
        self._clear()
        return batch

    def _clear(self) -> None:
        self._started: list[StreamStart] = []
        self._uids: list[bytes] = []
        self._tokens: list[bytes] = []
        self._finished: list[RequestState] = []
        self._logprobs: list[LogprobBatch] = []
        self._prompts: list[PromptLogprobs] = []
        self._num_tokens = 0


_VALUES: Final = ("num_top", "chosen", "ranks", "top_ids", "top_values")


def _packed(
    places: npt.NDArray[np.int64], num_top: npt.NDArray[np.integer[Any]], arrays: LogprobArrays
) -> LogprobBatch:
    """Return log-probabilities as flat arrays, each with as many alternatives as it wants."""
    num_top = np.minimum(num_top, arrays.top_ids.shape[1])
    wanted = np.arange(arrays.top_ids.shape[1]) < num_top[:, None]
    return LogprobBatch(
        places=_little_endian(places),
        num_top=_little_endian(num_top),
        chosen=arrays.chosen.astype("<f4", copy=False).tobytes(),
        ranks=_little_endian(arrays.ranks),
        top_ids=_little_endian(arrays.top_ids[wanted]),
        top_values=arrays.top_values[wanted].astype("<f4", copy=False).tobytes(),
    )


def _joined(batches: list[LogprobBatch]) -> LogprobBatch:
    """Return log-probabilities that came one after the other as one batch."""
    names = LogprobBatch.__struct_fields__
    return LogprobBatch(*(b"".join(getattr(one, name) for one in batches) for name in names))


def _little_endian(array: npt.NDArray[np.integer[Any]]) -> bytes:
    return array.astype("<i4", copy=False).tobytes()
