"""Anthropic's own package: a message, a stream, and what a prompt would count."""

import sys

from anthropic import Anthropic
from anthropic.types import MessageParam

MESSAGES: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def main(address: str) -> None:
    """Ask the server at ``address``."""
    client = Anthropic(base_url=address, api_key="none")
    model = client.models.list().data[0].id
    counted = client.messages.count_tokens(model=model, messages=MESSAGES)
    print("prompt tokens:", counted.input_tokens)
    greedy = {"temperature": 0}  # newer versions of the package have no argument for it
    message = client.messages.create(
        model=model, messages=MESSAGES, system="Be brief.", max_tokens=32, extra_body=greedy
    )
    print("answer:", "".join(block.text for block in message.content if block.type == "text"))
    with client.messages.stream(
        model=model, messages=MESSAGES, max_tokens=32, extra_body=greedy
    ) as stream:
        print("stream:", "".join(stream.text_stream))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
