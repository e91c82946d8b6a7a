"""What requests ask about tokens beyond sampling: torch references over per-row device state.

All of them work on several rows at once, and never wait for a GPU. In the order in which they are
applied to float32 logits: allowed tokens, biases and bans, banned sequences, penalties. Log-
probabilities are those of logits that nothing has changed yet.
"""

from typing import Final, NamedTuple

import torch

from minisgl.kernel.masks import check_words
from minisgl.kernel.sampling import is_true, likeliest

MIN_LOGPROB: Final = -9999.0
"""Reported for probabilities that are zero: JSON knows no infinity."""

_SPARE: Final = 32
"""Tokens looked at beyond those asked for: seldom are so many equal to the last of them."""


class ControlTensors(NamedTuple):
    """State of every row; it counts only for rows that use it.

    Attributes:
        counts: int32 ``[rows, vocab]``: 2 for each time that the output holds the token, plus 1 if
            the prompt does.
        allowed: int32 ``[rows, ceil(vocab / 32)]``: a bit for each token that is possible.
        presence, frequency, repetition: float32 ``[rows]``.
        bias_tokens, bias_until: int32 ``[rows, entries]``; an entry counts while the row has fewer
            tokens than ``until``.
        bias_values: float32 ``[rows, entries]``; 0 for entries that are not used, -inf for bans.
        bad_prefixes: int32 ``[rows, sequences, length]``: the tokens before the last one of each
            banned sequence, ending at the right, with -1 before them.
        bad_lasts: int32 ``[rows, sequences]``: the last tokens; -1 for sequences not used.
        recent: int32 ``[rows, length]``: the last tokens of the output, ending at the right, with
            -1 before them.
    """

    counts: torch.Tensor
    allowed: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    bias_tokens: torch.Tensor
    bias_until: torch.Tensor
    bias_values: torch.Tensor
    bad_prefixes: torch.Tensor
    bad_lasts: torch.Tensor
    recent: torch.Tensor


class TokenLogprobs(NamedTuple):
    """Log-probabilities of some tokens and of the likeliest ones in their places.

    Attributes:
        chosen: float32 ``[n]``.
        ranks: int32 ``[n]``: 1 for the likeliest; tokens of equal logits share a rank.
        top_ids: int32 ``[n, k]``, best first, equal ones by id.
        top_values: float32 ``[n, k]``.
    """

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, state: ControlTensors) -> None:
    """Ban all tokens but the allowed ones; see ``MaskLogits``."""
    check_words(logits, state.allowed)
    words = state.allowed[rows]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, : logits.shape[-1]]
    logits.masked_fill_(~allowed, float("-inf"))


def bias_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    state: ControlTensors,
    num_entries: int,
) -> None:
    """Add biases and bans; see ``BiasLogits``."""
    counts = lengths.unsqueeze(-1) < state.bias_until[rows, :num_entries]
    values = state.bias_values[rows, :num_entries].masked_fill_(~counts, 0.0)
    # Of the entries for one token at most one is finite and not zero: their order is no matter.
    logits.scatter_add_(-1, state.bias_tokens[rows, :num_entries].long(), values)


def ban_sequences(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: ControlTensors,
    num_sequences: int,
    length: int,
) -> None:
    """Ban the last tokens of sequences whose other tokens are there; see ``BanSequences``."""
    prefixes = state.bad_prefixes[rows, :num_sequences, -length:]
    recent = state.recent[rows, -length:].unsqueeze(1)
    lasts = state.bad_lasts[rows, :num_sequences]
    complete = ((prefixes == recent) | (prefixes < 0)).all(dim=-1) & (lasts >= 0)
    values = torch.zeros_like(lasts, dtype=logits.dtype).masked_fill_(complete, float("-inf"))
    logits.scatter_add_(-1, lasts.clamp(min=0).long(), values)


def penalize(logits: torch.Tensor, rows: torch.Tensor, state: ControlTensors) -> None:
    """Lower the logits of tokens that are there already; see ``Penalize``."""
    check_counts(logits, state)
    counts = state.counts[rows]
    repetition = state.repetition[rows].unsqueeze(-1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(counts != 0, repeated, logits))
    in_output = counts >> 1
    logits.sub_(in_output * state.frequency[rows].unsqueeze(-1))
    logits.sub_((in_output > 0) * state.presence[rows].unsqueeze(-1))


def check_counts(logits: torch.Tensor, state: ControlTensors) -> None:
    """Refuse logits of more tokens than are counted: others' counts would be read for theirs.

    Raises:
        ValueError: there are such tokens.
    """
    counted, vocab_size = state.counts.shape[-1], logits.shape[-1]
    if counted < vocab_size:
        raise ValueError(
            f"penalties count {counted} tokens, but the logits have {vocab_size}: a model must "
            "return as many logits as its config's vocab_size says"
        )


def note_tokens(rows: torch.Tensor, tokens: torch.Tensor, state: ControlTensors) -> None:
    """Count the tokens that rows have just got.

    Args:
        rows: int64 ``[S]``, each at most once.
        tokens: int64 ``[S]``.
        state: counts and recent tokens are changed.
    """
    state.counts[rows, tokens] += 2
    recent = state.recent[rows]
    state.recent[rows] = torch.cat((recent[:, 1:], tokens.unsqueeze(-1).int()), dim=-1)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenLogprobs:
    """Return log-probabilities of ``tokens`` and of the likeliest ones; see ``TokenLogprobsOp``."""
    probs = logits.float().log_softmax(dim=-1)
    chosen = probs.gather(-1, tokens.unsqueeze(-1))
    ranks = (probs > chosen).sum(dim=-1) + 1
    values, ids = _first_likeliest(probs, min(num_top, logits.shape[-1]))
    return TokenLogprobs(_finite(chosen.squeeze(-1)), ranks.int(), ids.int(), _finite(values))


def _first_likeliest(probs: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``num`` largest of each row and their ids, falling, then by id.

    Of those that equal the last one the lowest ids are among them.
    """
    vocab_size = probs.shape[-1]
    values, ids = likeliest(probs, min(num + _SPARE, vocab_size))
    last, (values, ids) = values[:, -1:], (values[:, :num], ids[:, :num])
    border = values[:, num - 1 :]
    if not num or num + _SPARE >= vocab_size or is_true((last < border).all()):
        return values, ids
    # Neither below nor above: what is no number counts as equal.
    every = torch.arange(vocab_size, dtype=torch.int32, device=probs.device)
    equal = every.masked_fill((probs < border) | (probs > border), vocab_size)
    lowest = equal.topk(num, dim=-1, largest=False).values
    place = torch.arange(num, device=probs.device) - (values > border).sum(dim=-1, keepdim=True)
    return values, torch.where(place < 0, ids, lowest.gather(-1, place.clamp(min=0)))


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num(nan=MIN_LOGPROB).clamp_(min=MIN_LOGPROB, max=0.0)
