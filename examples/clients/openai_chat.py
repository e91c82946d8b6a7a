"""OpenAI's own package: an answer, and a stream of another one."""

import sys

from openai import OpenAI


def main(address: str) -> None:
    """Ask the server at ``address``."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = "What is the capital of France?"
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=32,
    )
    print("answer:", answer.choices[0].message.content)
    stream = client.completions.create(
        model=model, prompt="One, two, three,", temperature=0, max_tokens=16, stream=True
    )
    print("stream:", "".join(chunk.choices[0].text for chunk in stream))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
