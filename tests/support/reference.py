"""The judge: greedy generation by Hugging Face transformers, in float32 on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

CLOSE_CALL = 1e-4
"""Where transformers' own two best logits are closer than this, either token may follow."""


@dataclass(frozen=True)
class Reference:
    """One prompt's greedy continuation.

    ``gaps`` holds, for each token, how far transformers' best logit was above the second best.
    """

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


@dataclass
class Tally:
    """Tokens compared, and how many differed where transformers itself was undecided."""

    num_tokens: int = 0
    num_close_calls: int = 0

    def compare(self, reference: Reference, tokens: Sequence[int], what: str) -> None:
        """Compare an output; after a close call the rest of that sequence is another text."""
        for place, (expected, got) in enumerate(zip(reference.tokens, tokens, strict=False)):
            self.num_tokens += 1
            if expected != got:
                gap = reference.gaps[place]
                assert gap < CLOSE_CALL, (
                    f"{what}: token {place} of the continuation of {len(reference.prompt)} tokens "
                    f"is {got}, transformers says {expected} (its top-2 gap is {gap:.2e})"
                )
                self.num_close_calls += 1
                return
        assert len(tokens) == len(reference.tokens), what

    def check(self) -> None:
        """At most one token in a thousand may be a close call."""
        assert self.num_tokens > 0
        assert self.num_close_calls * 1000 <= self.num_tokens, self


def confirmed(
    model: Any, drafts: Sequence[tuple[list[int], list[int]]], max_tokens: int, eos: Sequence[int]
) -> list[Reference]:
    """Return what ``greedy`` does, given prompts and drafts; where a draft is right, in one step.

    A draft in which each token is transformers' best one behind those before it, up to an end, is
    its greedy continuation. Where it is not, transformers continues the prompt itself.
    """
    references: list[Reference] = []
    for prompt, draft in drafts:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + draft])).logits[0, len(prompt) - 1 : -1].float()
        best, tokens = logits.topk(2, dim=-1)
        is_whole = len(draft) == max_tokens or draft[-1] in eos
        if is_whole and tokens[:, 0].tolist() == draft:
            references.append(Reference(prompt, draft, (best[:, 0] - best[:, 1]).tolist()))
        else:
            references += greedy(model, [prompt], max_tokens, eos)
    return references


def greedy(
    model: Any, prompts: Sequence[list[int]], max_tokens: int, eos: Sequence[int]
) -> list[Reference]:
    """Continue each prompt on its own, with transformers' cache."""
    references = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=list(eos),
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(output.logits).squeeze(1).float().topk(2, dim=-1).values
        tokens = output.sequences[0, len(prompt) :].tolist()
        references.append(Reference(prompt, tokens, (best[:, 0] - best[:, 1]).tolist()))
    return references
