"""One model on several ranks, offline: real processes, and the judge is transformers, as ever."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, AsyncLLM, SamplingParams
from minisgl.engine.parallel import ParallelEngine
from minisgl.errors import EngineLostError
from support.pressure import Pressure
from support.reference import Reference, Tally, greedy
from support.server_process import wait_for
from support.tiny_models import ARCHITECTURES, EOS_TOKEN_IDS, write_tiny_model

MAX_TOKENS = 12
# 263 tokens, 8 attention heads and 2 KV heads: on 4 ranks the vocabulary is padded and KV heads
# are replicated. Sizes that no number of ranks divides, and biases wherever a model can have them:
UNEVEN: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"intermediate_size": 97, "attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": {"intermediate_size": 93},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"attention_bias": True},
    "Qwen3MoeForCausalLM": {"intermediate_size": 97, "num_experts": 5},
    "MixtralForCausalLM": {"intermediate_size": 97, "num_local_experts": 5},
    "Qwen2MoeForCausalLM": {"moe_intermediate_size": 31, "shared_expert_intermediate_size": 41},
    "OlmoeForCausalLM": {"intermediate_size": 53, "attention_bias": True},
}


Model = tuple[Path, list[Reference]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Makes each architecture's model once, and what transformers says to it."""
    return cache(partial(make_model, tmp_path_factory.mktemp("tiny")))


def make_model(folder: Path, architecture: str) -> Model:
    """A tiny checkpoint, and transformers' continuations of 12 prompts, some with shared heads."""
    path = write_tiny_model(folder / architecture, architecture, **UNEVEN[architecture])
    random = np.random.default_rng(11)
    shared = random.integers(3, 263, size=20).tolist()
    lengths = [1, 2, 7, 8, 9, 24, 25, 40, 41, 64, 80, 100]
    prompts = [
        [*(shared if place % 2 else []), *random.integers(3, 263, size=length).tolist()]
        for place, length in enumerate(lengths)
    ]
    # transformers multiplies experts of sizes that are no multiples of 16 bytes one by one only.
    judge = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    return path, greedy(judge, prompts, MAX_TOKENS, EOS_TOKEN_IDS)


@pytest.mark.parametrize(
    ("architecture", "tp"),
    [
        *((architecture, 1) for architecture in ARCHITECTURES),
        # Shards of every architecture on 1 to 8 ranks: tests/models/test_tensor_parallel.py.
        *(("MistralForCausalLM", 2), ("Qwen2ForCausalLM", 2), ("Qwen3ForCausalLM", 2)),
        pytest.param("LlamaForCausalLM", 4, marks=pytest.mark.slow),
        *(("MixtralForCausalLM", 2), ("Qwen2MoeForCausalLM", 2), ("OlmoeForCausalLM", 2)),
        pytest.param("Qwen3MoeForCausalLM", 4, marks=pytest.mark.slow),
        pytest.param("MixtralForCausalLM", 4, marks=pytest.mark.slow),
        pytest.param("Qwen2MoeForCausalLM", 4, marks=pytest.mark.slow),
        pytest.param("OlmoeForCausalLM", 4, marks=pytest.mark.slow),
    ],
)
def test_every_number_of_ranks_is_exact_under_page_pressure(
    models: Callable[[str], Model], architecture: str, tp: int
) -> None:
    path, references = models(architecture)
    tally = Tally()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    scheduler = {"overlap": "on", "launch": "split" if tp == 2 else "mixed"}
    with LLM(
        str(path), tp=tp, page_size=8, num_pages=30, max_prefill_tokens=40, scheduler=scheduler,
        progress=False,
    ) as llm:  # fmt: skip
        pressure = Pressure(llm)
        for batch in (references, references[:1], references[3:8]):
            results = llm.generate([one.prompt for one in batch], params, progress=False)
            for reference, result in zip(batch, results, strict=True):
                tally.compare(reference, result.token_ids, f"tp={tp}, batch of {len(batch)}")
        assert pressure.num_evicted > 0
        assert pressure.num_retracted > 0
        if tp > 1:
            engine_of(llm).check_alive()
    tally.check()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")


@pytest.fixture
def two_ranks(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), tp=2, num_pages=60, progress=False) as llm:
        yield llm


def engine_of(llm: LLM) -> ParallelEngine:
    engine = llm._session._scheduler._engine
    assert isinstance(engine, ParallelEngine)
    return engine


def alter_plans(llm: LLM, word: int, value: int) -> None:
    """Give rank 1 other plans from now on: ``value`` in place of one word."""
    group = engine_of(llm)._group
    send = group.send

    def altered(plan: memoryview) -> None:
        words = np.frombuffer(plan, dtype=np.int32).copy()
        words[word] = value
        send(words.data.cast("B"))

    group.send = altered  # type: ignore[method-assign]  # the fault that is injected


def test_a_rank_that_got_other_plans_is_named(two_ranks: LLM) -> None:
    """Catches: ranks that compute different requests, and mix the results in silence."""
    two_ranks.generate([5, 6, 7], SamplingParams(max_tokens=4), progress=False)
    alter_plans(two_ranks, -1, 9)
    with pytest.raises(EngineLostError, match=r"rank 1 \(pid \d+\) got other plans than rank 0"):
        two_ranks.generate(
            [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True), progress=False
        )
    with pytest.raises(RuntimeError, match="closed"):
        two_ranks.generate([5, 6, 7], progress=False)


def test_a_step_that_fails_on_one_rank_ends_everything_with_its_error(two_ranks: LLM) -> None:
    alter_plans(two_ranks, 0, 12345)
    group = engine_of(two_ranks)._group
    with pytest.raises(EngineLostError, match=r"rank 1 \(pid \d+\) failed: AssertionError: plans"):
        two_ranks.generate([5, 6, 7], progress=False)
    assert all(rank.process.returncode is not None for rank in group._resources.ranks)


def test_an_async_llm_that_loses_a_rank_says_so_without_a_traceback(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny), tp=2, num_pages=60, progress=False) as llm:
            scheduler = llm._session._scheduler
            [rank] = scheduler._engine._group._resources.ranks  # type: ignore[attr-defined]
            stream = llm.generate([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(stream)
            rank.process.kill()
            with pytest.raises(EngineLostError, match=r"^rank 1 \(pid \d+\) was killed by SIGKILL"):
                async for _ in stream:
                    pass
            with pytest.raises(RuntimeError, match="closed"):
                await anext(llm.generate([5, 6, 7]))

    asyncio.run(main())
    assert [record.message for record in caplog.records if record.exc_info] == []


SCRIPT = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from minisgl import LLM, SamplingParams

# No `if __name__ == "__main__"`: ranks do not run this script again.
os.environ["PYTHONHASHSEED"] = sys.argv[2]
with ThreadPoolExecutor(1) as pool:  # ranks outlive the thread that started them
    llm = pool.submit(LLM, sys.argv[1], tp=2, num_pages=24, page_size=4, max_prefill_tokens=16,
                      max_seq_len=90, progress=False).result()
prompts = [[3 + (7 * n + k) % 250 for k in range(4 + 3 * n % 30)] for n in range(12)]
params = SamplingParams(temperature=0.8, max_tokens=16, min_tokens=3)
for result in llm.generate(prompts, params, progress=False):
    print(result.token_ids)
engine = llm._session._scheduler._engine
while any(rank.finished != engine._own.finished for rank in engine._group.board.ranks):
    engine.check_alive()
print([rank.finished for rank in engine._group.board.ranks])
print(*{rank.digests(rank.finished) for rank in engine._group.board.ranks})
print(engine._group._resources.ranks[0].process.pid, file=sys.stderr, flush=True)
if sys.argv[3] == "killed":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(model: Path, seeds: tuple[str, str], end: str) -> list[str]:
    """Run it with a hash seed for each rank; check that nothing is left; return what it printed."""
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(model), seeds[1], end],
            env={**os.environ, "PYTHONHASHSEED": seeds[0], "TMPDIR": temporary},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
        [pid] = done.stderr.split()  # and no warning
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of rank 1")
        assert list(Path(temporary).iterdir()) == []
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_invariant_13_ranks_with_different_hash_seeds_run_byte_identical_plans(tiny: Path) -> None:
    """Catches: running rows kept in a set, order taken from identity or hashes.

    The first run ends without ``close``, the second by SIGKILL: no rank outlives rank 0.
    """
    first = run_script(tiny, ("1", "77"), "ends")
    assert "Digests" in first[-1]
    assert first[-1].count("Digests") == 1, "the ranks differ"
    assert run_script(tiny, ("42", "random"), "killed") == first
