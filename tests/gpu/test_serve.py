"""``minisgl serve`` on a card: with the plugin's models, and with core and FlashInfer alone."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.reference import greedy
from support.server_process import serving
from support.tiny_models import EOS_TOKEN_IDS, WIDE, write_tiny_model

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24


@pytest.mark.parametrize("flags", [(), ("--disable-plugin", "minisgl-models")], ids=["all", "core"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_server_answers(architecture: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """In bfloat16; what transformers decides clearly in float32 survives that."""
    pytest.importorskip("flashinfer")
    path = write_tiny_model(tmp_path / architecture, architecture, **WIDE)
    judge = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [list(range(3, 3 + length)) for length in range(5, 150, 4)]
    clear = [one for one in greedy(judge, prompts, 1, EOS_TOKEN_IDS) if one.gaps[0] > 0.5]
    assert len(clear) > 4
    tokenizer = AutoTokenizer.from_pretrained(path)
    log = tmp_path / "server.log"
    # So many pages: other tests use the same card at the same time.
    flags = (*flags, "--dtype", "bfloat16", "--num-pages", "500")
    flags = (*flags, "--attention-backend", "flashinfer")
    with serving(str(path), log, *flags) as url:
        body = {"prompt": [one.prompt for one in clear], "temperature": 0, "ignore_eos": True}
        firsts = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 1}, timeout=60)
        body = {**body, "prompt": clear[0].prompt, "max_tokens": NUM_TOKENS}
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        streamed, num_events = read_stream(f"{url}/v1/completions", body)
    texts = [choice["text"] for choice in firsts.json()["choices"]]
    assert texts == [tokenizer.decode(one.tokens[:1]) for one in clear]
    assert whole["usage"]["completion_tokens"] == NUM_TOKENS
    assert streamed == whole["choices"][0]["text"]
    assert num_events > 1
    said = log.read_text()
    chosen = re.findall(r"attention +(prefill|decode) +flashinfer +\S+ +chosen", said)
    assert sorted(chosen) == ["decode", "prefill"], said
    assert ("transformers' own code" in said) == ("--disable-plugin" in flags), said


def read_stream(url: str, body: dict[str, Any]) -> tuple[str, int]:
    """Return the text of a streamed completion and the number of its events."""
    text, num_events = "", 0
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += "".join(one["text"] for one in json.loads(line[6:])["choices"])
                num_events += 1
    return text, num_events
