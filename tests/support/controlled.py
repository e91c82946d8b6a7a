"""The judge of what requests ask about tokens: plain loops over transformers' logits.

Every step is computed anew from the tokens so far, one request at a time, without a cache; nothing
of the engine is used.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from minisgl import SamplingParams
from support.reference import Reference

INF = float("inf")


@dataclass(frozen=True)
class Judged(Reference):
    """A greedy continuation, and transformers' log-probabilities at each of its places.

    ``logprobs`` has a row ``[vocab]`` for each token, float64; ``prompt_logprobs`` one for each
    token of the prompt but the first.
    """

    logprobs: list[torch.Tensor] = field(default_factory=list)
    prompt_logprobs: list[torch.Tensor] = field(default_factory=list)


def judge(model: Any, prompt: list[int], params: SamplingParams, eos: list[int]) -> Judged:
    """Continue ``prompt`` greedily as ``params`` asks."""
    result = Judged(prompt, [], [])
    assert params.max_tokens is not None
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    while len(result.tokens) < params.max_tokens:
        rows = _logits(model, prompt + result.tokens)
        if not result.tokens:
            result.prompt_logprobs.extend(rows[:-1].double().log_softmax(-1))
        result.logprobs.append(rows[-1].double().log_softmax(-1))
        logits = controlled(rows[-1].tolist(), prompt, result.tokens, params, ends)
        first, second = sorted(logits, reverse=True)[:2]
        token = logits.index(first)
        result.tokens.append(token)
        result.gaps.append(first - second)
        if token in ends:
            break
    return result


def controlled(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    ends: set[int],
) -> list[float]:
    """Return what one row's logits become, token by token."""
    return [
        _changed(value, token, prompt, output, params, ends) for token, value in enumerate(logits)
    ]


def _changed(
    logit: float,
    token: int,
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    ends: set[int],
) -> float:
    bias = params.logit_bias.get(token, 0)
    banned = bias == -100 or (token in ends and len(output) < params.min_tokens)
    if params.allowed_token_ids is not None:
        banned |= token not in params.allowed_token_ids
    for bad in params.bad_token_ids:
        before = list(bad[:-1])
        banned |= token == bad[-1] and (not before or output[-len(before) :] == before)
    if banned:
        return -INF
    logit += bias
    if token in prompt or token in output:
        by = params.repetition_penalty
        logit = logit / by if logit > 0 else logit * by
    logit -= params.frequency_penalty * output.count(token)
    return logit - params.presence_penalty * (token in output)


def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits
