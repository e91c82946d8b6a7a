"""OpenAI's own package with asyncio: several requests at once, each a stream."""

import asyncio
import sys

from openai import AsyncOpenAI

COUNTRIES = ("France", "Italy", "Germany")


async def ask(client: AsyncOpenAI, model: str, country: str) -> str:
    """Return what the model says about a country."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = []
    async for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        if chunk.usage is not None:
            pieces.append(f" ({chunk.usage.completion_tokens} tokens)")
    return "".join(pieces)


async def main(address: str) -> None:
    """Ask the server at ``address`` about all countries together."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        models = await client.models.list()
        name = models.data[0].id
        answers = await asyncio.gather(*(ask(client, name, country) for country in COUNTRIES))
    for country, answer in zip(COUNTRIES, answers, strict=True):
        print(f"{country}: {answer}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
