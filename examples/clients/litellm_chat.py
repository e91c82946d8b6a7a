"""litellm: the server is ``hosted_vllm``, its provider for servers with OpenAI's API."""

import sys

import litellm
from openai import OpenAI


def main(address: str) -> None:
    """Ask the server at ``address``."""
    name = OpenAI(base_url=f"{address}/v1", api_key="none").models.list().data[0].id
    where = {"model": f"hosted_vllm/{name}", "api_base": f"{address}/v1", "api_key": "none"}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = litellm.completion(**where, messages=messages, temperature=0, max_tokens=32)
    print("answer:", answer.choices[0].message.content)
    stream = litellm.completion(
        **where, messages=messages, temperature=0, max_tokens=32, stream=True
    )
    print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
