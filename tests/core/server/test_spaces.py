"""Public case R08: spaces between words survive a stream, whatever the tokenizer's kind."""

import asyncio
import json
from typing import Any

import pytest

from support.in_process_engine import Served, served
from support.patience import PATIENCE
from support.text_tokenizers import byte_level, sentencepiece

TEXT = "/v1/completions"
PROMPT = "Hello world the quick Hello the world"


async def scenario(server: Served) -> tuple[str, str, int]:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = (await server.http.post(TEXT, json=body)).json()["choices"][0]["text"]
    lines = (await server.http.post(TEXT, json={**body, "stream": True})).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    pieces = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
    return whole, "".join(pieces), len([piece for piece in pieces if piece])


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_r08_spaces_between_words_survive_the_stream(make: Any) -> None:
    async def main() -> tuple[str, str, int]:
        async with served(tokenizer=make()) as server:
            return await asyncio.wait_for(scenario(server), PATIENCE)

    whole, streamed, num_pieces = asyncio.run(main())
    assert streamed == whole
    assert num_pieces > 10, "the stream came in pieces"
    # The engine says the prompt's tokens again and again.
    assert whole.startswith(PROMPT[:20])
    assert "  " not in whole
