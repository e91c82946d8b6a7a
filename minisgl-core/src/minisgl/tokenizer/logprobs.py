"""Log-probabilities as users see them: numbers of the scheduler with the tokens' texts and bytes.

The bytes of the tokens of a text concatenate to the text: a token that the text leaves out, as
special ones are, has none, and one that is part of a character has its part. The exception are
bytes that are no UTF-8: the text has U+FFFD for them. A token's own text is what its bytes say,
with U+FFFD for cut characters; a token that is left out is shown as it is spelt.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from minisgl.message import LogprobBatch, PromptEcho, TokenBatch, TokenLogprob, TopLogprob
from minisgl.tokenizer.incremental import TextDecoder


class RawLogprob(NamedTuple):
    """The numbers of one token: its own, and the best alternatives in their order."""

    logprob: float
    rank: int
    top_ids: Sequence[int]
    top_values: Sequence[float]


class StepTokens(NamedTuple):
    """One request's tokens of a step, and as many log-probabilities or none."""

    token_ids: list[int]
    logprobs: list[RawLogprob]


Describe = Callable[[int], tuple[str, bytes]]
"""Gives the text and the bytes of a token where it would stand."""


def tokens_by_request(batch: TokenBatch) -> Mapping[int, StepTokens]:
    """Return each request's tokens of this step, in the batch's order."""
    uids = np.frombuffer(batch.uids, dtype="<i8").tolist()
    token_ids = np.frombuffer(batch.token_ids, dtype="<i4").tolist()
    by_request: dict[int, StepTokens] = {}
    for uid, token_id in zip(uids, token_ids, strict=True):
        tokens = by_request.get(uid)
        if tokens is None:
            by_request[uid] = StepTokens([token_id], [])
        else:
            tokens.token_ids.append(token_id)
    if batch.logprobs is not None:
        places = np.frombuffer(batch.logprobs.places, dtype="<i4").tolist()
        for place, logprob in zip(places, unpack(batch.logprobs), strict=True):
            by_request[uids[place]].logprobs.append(logprob)
    return by_request


def unpack(batch: LogprobBatch) -> list[RawLogprob]:
    """Return the numbers of each token of a batch."""
    num_top = np.frombuffer(batch.num_top, dtype="<i4").tolist()
    chosen = np.frombuffer(batch.chosen, dtype="<f4").tolist()
    ranks = np.frombuffer(batch.ranks, dtype="<i4").tolist()
    top_ids = np.frombuffer(batch.top_ids, dtype="<i4").tolist()
    top_values = np.frombuffer(batch.top_values, dtype="<f4").tolist()
    found: list[RawLogprob] = []
    first = 0
    for number, logprob, rank in zip(num_top, chosen, ranks, strict=True):
        some = slice(first, first + number)
        found.append(RawLogprob(logprob, rank, top_ids[some], top_values[some]))
        first += number
    return found


def describe_token(token_id: int, raw: RawLogprob, describe: Describe) -> TokenLogprob:
    """Return a token's numbers with the texts and bytes of it and its alternatives."""
    chosen = TopLogprob(token_id, *describe(token_id), raw.logprob, raw.rank)
    top: list[TopLogprob] = []
    for place, (other, value) in enumerate(zip(raw.top_ids, raw.top_values, strict=True), 1):
        # Tokens that are equally likely share a rank.
        rank = top[-1].rank if top and top[-1].logprob == value else place
        top.append(TopLogprob(other, *describe(other), value, rank))
    return TokenLogprob(chosen, top)


def without_text(_: int) -> tuple[str, bytes]:
    """Describe a token where there is no tokenizer."""
    return "", b""


def echo(
    token_ids: list[int], logprobs: LogprobBatch | None, decoder: TextDecoder | None
) -> PromptEcho:
    """Return a prompt as its request wants it back, special tokens included.

    Args:
        token_ids: of the prompt.
        logprobs: of all tokens but the first, if they are wanted.
        decoder: of the tokenizer, if there is one.
    """
    text = "" if decoder is None else decoder.decode(token_ids)
    described: list[TokenLogprob | None] = []
    first_text, first_data = "", b""
    if logprobs is not None:
        stream = None if decoder is None else decoder.stream(skip_special_tokens=False)
        describe = without_text if stream is None else stream.describe
        first_text, first_data = describe(token_ids[0])
        numbers = [None, *unpack(logprobs)]
        for token_id, raw in zip(token_ids, numbers, strict=True):
            described.append(None if raw is None else describe_token(token_id, raw, describe))
            if stream is not None:
                stream.push(token_id)
    return PromptEcho(token_ids, text, described, first_text, first_data)
