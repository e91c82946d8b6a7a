"""OpenAI's own package: an answer that is a pydantic model (``response_format``, JSON schema)."""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """What the answer must look like."""

    name: str
    continent: Literal["Africa", "America", "Asia", "Australia", "Europe"]
    is_capital: bool


def main(address: str) -> None:
    """Ask the server at ``address``."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe the city of Paris as JSON."}],
        response_format=City,
        temperature=0,
        max_tokens=200,
    )
    print(answer.choices[0].message.parsed)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
