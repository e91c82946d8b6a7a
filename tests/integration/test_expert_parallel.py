"""Experts spread over ranks, in real processes: token for token what transformers says."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from support.plugin_site import PluginSite
from support.reference import Reference, Tally, greedy
from support.tiny_models import EOS_TOKEN_IDS, write_tiny_model

MAX_TOKENS = 12
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"num_experts": 8},
    "MixtralForCausalLM": {"num_local_experts": 8},
    "Qwen2MoeForCausalLM": {"num_experts": 8},
    "OlmoeForCausalLM": {"num_experts": 8},
}
Model = tuple[Path, list[Reference]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Makes each architecture's model once, and what transformers says to it."""
    return cache(partial(make_model, tmp_path_factory.mktemp("tiny")))


def make_model(folder: Path, architecture: str) -> Model:
    """A tiny checkpoint, and transformers' continuations of 8 prompts."""
    path = write_tiny_model(folder / architecture, architecture, **EXPERTS[architecture])
    random = np.random.default_rng(11)
    prompts = [
        random.integers(3, 263, size=length).tolist() for length in (1, 2, 8, 9, 25, 41, 64, 100)
    ]
    judge = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return path, greedy(judge, prompts, MAX_TOKENS, EOS_TOKEN_IDS)


@pytest.mark.parametrize(
    ("architecture", "tp", "ep", "exchange"),
    [
        ("Qwen3MoeForCausalLM", 2, 2, "all-to-all"),
        ("MixtralForCausalLM", 2, 2, "auto"),
        ("Qwen2MoeForCausalLM", 2, 2, "all-to-all"),
        ("OlmoeForCausalLM", 2, 2, "auto"),
        # In threads, for all layouts and exchanges: tests/models/test_expert_parallel.py.
        *(
            pytest.param(architecture, 4, ep, exchange, marks=pytest.mark.slow)
            for architecture, ep, exchange in (
                ("Qwen3MoeForCausalLM", 4, "auto"),
                ("MixtralForCausalLM", 4, "all-to-all"),
                ("Qwen2MoeForCausalLM", 2, "auto"),
                ("OlmoeForCausalLM", 2, "all-to-all"),
            )
        ),
    ],
)
def test_ranks_with_different_experts_say_what_transformers_says(
    models: Callable[[str], Model], architecture: str, tp: int, ep: int, exchange: str
) -> None:
    path, references = models(architecture)
    tally = Tally()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(
        str(path), tp=tp, ep=ep, moe_exchange=exchange, page_size=8, max_prefill_tokens=40,
        progress=False,
    ) as llm:  # fmt: skip
        for batch in (references, references[:1], references[3:6]):
            results = llm.generate([one.prompt for one in batch], params, progress=False)
            for reference, result in zip(batch, results, strict=True):
                tally.compare(reference, result.token_ids, f"ep={ep}, batch of {len(batch)}")
    tally.check()


PLUGIN = """
from minisgl.plugins import ExpertExchangeRecord, NoSettings, Supported, hookimpl

def create(context, settings):
    from pathlib import Path
    from minisgl.moe import DispatchedTokens, ExpertExchange

    class Gathered(ExpertExchange):
        def dispatch(self, hidden, weights, experts):
            return DispatchedTokens(hidden, weights, experts)

        def combine(self, out, tokens, partial):
            with Path({folder!r}, str(context.communicator.rank)).open("a") as file:
                file.write("x")
            total = out if partial is None else out + partial
            return context.communicator.all_gather(total.unsqueeze(0), dim=0).sum(0)

    return Gathered()

@hookimpl
def minisgl_expert_exchanges():
    yield ExpertExchangeRecord(
        name="gathered", summary="A test's", settings_type=NoSettings,
        probe=lambda query: Supported(query.expert_parallel_size, 0), create=create,
    )
"""

SCRIPT = """
from minisgl import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens={max_tokens})
with LLM({path!r}, tp=2, ep=2, page_size=8, progress=False) as llm:
    for result in llm.generate({prompts!r}, params, progress=False):
        print(result.token_ids)
"""


def test_a_plugins_exchange_serves_all_ranks(
    models: Callable[[str], Model], tmp_path: Path
) -> None:
    path, references = models("Qwen2MoeForCausalLM")
    site, calls = PluginSite(tmp_path / "site"), tmp_path / "calls"
    calls.mkdir()
    site.add("acme", PLUGIN.replace("{folder!r}", repr(str(calls))))
    prompts = [one.prompt for one in references]
    done = site.python(SCRIPT.format(path=str(path), prompts=prompts, max_tokens=MAX_TOKENS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(one.tokens) for one in references]
    counts = {file.name: len(file.read_text()) for file in calls.iterdir()}
    # The same number of times on both, at least once a step and layer with experts.
    assert counts["0"] == counts["1"] >= 2 * MAX_TOKENS
