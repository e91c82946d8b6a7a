"""OpenAI's own package: the model must call a function, which any model can."""

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionToolUnionParam

TOOLS: list[ChatCompletionToolUnionParam] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def main(address: str) -> None:
    """Ask the server at ``address``."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather like in Rome?"}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    for call in answer.choices[0].message.tool_calls or ():
        if isinstance(call, ChatCompletionMessageFunctionToolCall):
            print(call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
