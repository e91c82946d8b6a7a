"""The judge of what requests ask about tokens: plain loops over transformers' logits.

Every step is computed anew from the tokens so far, one request at a time, without a cache; nothing
of the engine is used.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from minisgl import SamplingParams
from support.reference import Reference
from support.tiny_models import EOS_TOKEN_IDS
from support.tiny_models import VOCAB_SIZE as VOCAB

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


MAX_TOKENS = 24


def asked_for(plain: list[int]) -> dict[str, dict[str, Any]]:
    """Return what to ask for, made for an answer that would be ``plain``: so that it matters."""
    return {
        "none": {},
        "presence": {"presence_penalty": 1.7},
        "frequency": {"frequency_penalty": 0.9},
        "negative": {"frequency_penalty": -1.5, "presence_penalty": -2},
        "repetition": {"repetition_penalty": 2.5},
        "all penalties": {
            "repetition_penalty": 0.6,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
        },
        "bias": {"logit_bias": {token: 2.0 + token % 7 for token in range(20, 60)}},
        "ban by bias": {"logit_bias": dict.fromkeys(plain[2:5], -100)},
        "allowed": {"allowed_token_ids": list(range(3, 40))},
        "bad words": {"bad_token_ids": [(plain[1],), (plain[2], plain[3]), tuple(plain[4:7])]},
        "min tokens": {"ignore_eos": False, "min_tokens": 12, "stop_token_ids": plain[3:5]},
        "everything": {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.4,
            "logit_bias": {7: 3.0, plain[6]: -100, plain[0]: 5.0},
            "allowed_token_ids": list(range(5, 261)),
            "bad_token_ids": [(plain[1],), (plain[2], plain[3]), (plain[0], plain[0])],
            "ignore_eos": False,
            "min_tokens": 5,
            "stop_token_ids": (plain[0],),
        },
    }


NAMES = list(asked_for([0] * MAX_TOKENS))


def prompts() -> list[list[int]]:
    """One for each of ``NAMES``; some begin alike, longer than a page."""
    random = np.random.default_rng(5)
    shared = random.integers(3, VOCAB, size=40).tolist()
    return [
        (shared if place % 3 == 0 else []) + random.integers(3, VOCAB, size=3 + 5 * place).tolist()
        for place in range(len(NAMES))
    ]


@dataclass(frozen=True)
class Case:
    """A prompt, what is asked of it, and the judge's answer."""

    name: str
    params: SamplingParams
    judged: Judged
    changed: bool


def controlled_cases(path: Path) -> list[Case]:
    """Return a case for each control, judged with the tiny model at ``path``."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    cases = []
    for name, prompt in zip(NAMES, prompts(), strict=True):
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        plain = judge(model, prompt, greedy, []).tokens
        params = msgspec.structs.replace(greedy, **asked_for(plain)[name])
        judged = judge(model, prompt, params, list(EOS_TOKEN_IDS))
        cases.append(Case(name, params, judged, plain[: len(judged.tokens)] != judged.tokens))
    return cases
