"""Token counts of one HTTP request, while it runs and at its end."""

from dataclasses import dataclass, field
from typing import Any

from minisgl.message import TextReply


@dataclass(slots=True)
class Usage:
    """Counts the tokens of ``n`` answers to each prompt; a prompt counts once.

    Attributes:
        n: answers to each prompt.
        counts_output: false where what the engine generated is left out of the answer.
        num_prompt_tokens, num_cached_tokens: of all prompts so far.
        num_completion_tokens: of all answers so far.
        num_reasoning_tokens: how many of these were reasoning; counted in whole increments.
    """

    n: int = 1
    counts_output: bool = True
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    _counted_prompts: set[int] = field(default_factory=set)
    _counted_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, reply: TextReply) -> None:
        """Count a reply to the answer ``index``."""
        prompt = index // self.n
        if prompt not in self._counted_prompts:
            self._counted_prompts.add(prompt)
            self.num_prompt_tokens += reply.num_prompt_tokens
            # The first answer's: the others find the prompt that it has just computed.
            self.num_cached_tokens += reply.num_cached_tokens
        if not self.counts_output:
            return
        before = self._counted_tokens.get(index, 0)
        now = before + len(reply.token_ids)
        if reply.finish_reason is not None:  # a total, which also covers tokens without a reply
            now = reply.num_completion_tokens
            self._counted_tokens.pop(index, None)
        else:
            self._counted_tokens[index] = now
        self.num_completion_tokens += now - before

    def openai(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage
