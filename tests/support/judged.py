"""Texts of low precision, judged by what the same engine computes from whole texts."""

from minisgl import LLM, SamplingParams

MOST = 0.1
"""Of log-probability, what rounding to bfloat16 makes of two equal logits of a tiny model; a token
that has nothing to do with the text is worse by 0.4 or more in 99 of 100 cases."""


def check_judged(llm: LLM, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Each token of a greedy output is the best one behind those before it, or nearly as good.

    The judge computes prompt and output as one prompt, by prefill, and reports its tokens'
    log-probabilities: no step of decoding takes part.
    """
    texts = [one + other for one, other in zip(prompts, outputs, strict=True)]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=1)
    for prompt, one in zip(prompts, llm.generate(texts, asked, progress=False), strict=True):
        assert one.prompt_logprobs is not None
        for given in one.prompt_logprobs[len(prompt) :]:
            assert given is not None
            worse = given.top[0].logprob - given.token.logprob
            assert worse < MOST, f"a token is worse than the best one by {worse:.2f}"
