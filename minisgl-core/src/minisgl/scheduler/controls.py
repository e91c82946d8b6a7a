"""From sampling parameters to the record of a row that asks for more than sampling."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from minisgl.engine.controls import FOREVER, IntArray, RowControls
from minisgl.request import MAX_BAD_TOKENS, SamplingParams
from minisgl.scheduler.request_state import RequestState

BAN: Final = -100.0
"""The ``logit_bias`` that makes a token impossible, as OpenAI documents."""


def controls_of(
    request: RequestState,
    tokens: IntArray,
    *,
    min_end: int,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> RowControls | None:
    """Return what a request that just got a row asks for; ``None`` if it is nothing.

    Args:
        request: with a row.
        tokens: int32: its prompt and all of its output so far; nothing of it is in flight.
        min_end: number of tokens below which it must not stop.
        vocab_size: of the model.
        eos_token_ids: of the model.
    """
    params = request.params
    entries = _entries(request, min_end, eos_token_ids)
    sequences = [one for one in params.bad_token_ids if len(one) > 1]
    penalizes = has_penalties(params)
    scores = -1 if request.scored or params.prompt_logprobs is None else params.prompt_logprobs
    asks = entries or sequences or penalizes or params.allowed_token_ids is not None
    if not asks and params.logprobs is None and scores < 0:
        return None
    num_prompt = request.num_prompt_tokens
    length = max((len(one) - 1 for one in sequences), default=0)
    prefixes = np.full((len(sequences), length), -1, dtype=np.int32)
    for place, one in enumerate(sequences):
        prefixes[place, length - len(one) + 1 :] = one[:-1]
    no_tokens = tokens[:0]
    output = tokens[num_prompt:]
    if not penalizes:
        output = output[-(MAX_BAD_TOKENS - 1) :] if sequences else no_tokens
    return RowControls(
        row=request.row,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=scores,
        bias_tokens=np.array([token for token, _, _ in entries], dtype=np.int32),
        bias_until=np.array([until for _, until, _ in entries], dtype=np.int32),
        bias_values=np.array([value for _, _, value in entries], dtype=np.float32),
        bad_prefixes=prefixes,
        bad_lasts=np.array([one[-1] for one in sequences], dtype=np.int32),
        allowed=_bits(params.allowed_token_ids, vocab_size),
        prompt=tokens[:num_prompt] if params.repetition_penalty != 1 or scores >= 0 else no_tokens,
        output=output,
        comes_and_goes=params.grammar is not None,
    )


def has_penalties(params: SamplingParams) -> bool:
    """Return whether a penalty of ``params`` changes anything."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    )


def possibly_banned(params: SamplingParams, eos_token_ids: frozenset[int]) -> set[int]:
    """Return the tokens that may be impossible for a request at one time or another."""
    banned = {token for token, bias in params.logit_bias.items() if bias == BAN}
    banned.update(one[-1] for one in params.bad_token_ids)
    if params.min_tokens:
        banned.update(_stops(params, eos_token_ids))
    return banned


def _entries(
    request: RequestState, min_end: int, eos_token_ids: frozenset[int]
) -> list[tuple[int, int, float]]:
    """Return (token, until, bias) of single tokens."""
    params = request.params
    entries = [
        (token, FOREVER, float("-inf") if bias == BAN else bias)
        for token, bias in params.logit_bias.items()
        if bias
    ]
    entries += [(one[0], FOREVER, float("-inf")) for one in params.bad_token_ids if len(one) == 1]
    if params.min_tokens:
        stops = sorted(_stops(params, eos_token_ids))
        entries += [(token, min_end, float("-inf")) for token in stops]
    return entries


def _stops(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end a request."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | eos_token_ids


def _bits(token_ids: Sequence[int] | None, vocab_size: int) -> IntArray:
    """Return a bit for each token of the vocabulary, int32 words; none if all are allowed."""
    if token_ids is None:
        return np.empty(0, dtype=np.int32)
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)
