"""The engine on a card: exact in float32, graphs equal eager steps, nothing lost under churn."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.attention.batch import Batch
from minisgl.bootstrap import build_scheduler
from minisgl.engine.engine import Engine
from minisgl.engine.host_mirror import Launch
from minisgl.kernel.triton import shared_prefix
from minisgl.message import AbortRequest, GenerateRequest
from minisgl.scheduler.transport import MemoryTransport
from minisgl.settings import settings_from_keywords
from support.controlled import controlled_cases
from support.judged import check_judged
from support.reference import Tally, greedy
from support.tiny_models import ARCHITECTURES, EOS_TOKEN_IDS, WIDE, write_tiny_model

pytestmark = pytest.mark.gpu

MAX_TOKENS = 20


def prompts_of(count: int, seed: int = 7) -> list[list[int]]:
    random = np.random.default_rng(seed)
    shared = random.integers(3, 259, size=40).tolist()
    return [
        (shared if place % 3 == 0 else [])
        + random.integers(3, 259, size=int(random.integers(1, 120))).tolist()
        for place in range(count)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_float32_greedy_tokens_are_those_of_transformers(
    architecture: str, page_size: int, tmp_path: Path
) -> None:
    """transformers on the card too, with the same exact products (TF32 is off)."""
    path = write_tiny_model(tmp_path / architecture, architecture)
    judge = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    references = greedy(judge, prompts_of(16), MAX_TOKENS, EOS_TOKEN_IDS)
    tally = Tally()
    with LLM(
        str(path), device="cuda", dtype="float32", attention_backend="torch", page_size=page_size,
        num_pages=2048 // page_size, max_running_requests=8, max_prefill_tokens=100, progress=False,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        for _ in range(2):
            results = llm.generate([one.prompt for one in references], params, progress=False)
            for reference, result in zip(references, results, strict=True):
                tally.compare(reference, result.token_ids, architecture)
    tally.check()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("max_graph_rows", [0, None])
def test_controls_give_the_judges_tokens_and_logprobs(
    page_size: int, max_graph_rows: int | None, tmp_path: Path
) -> None:
    """Penalties, biases, bans and masks, with overlap, chunks and retraction.

    Catches: a state that is changed on another stream, a plan whose records the kernel steps over
    by a wrong number of words, a row that keeps the token that the graph drew.
    """
    path = write_tiny_model(tmp_path / "qwen3", "Qwen3ForCausalLM")
    cases, tally = controlled_cases(path), Tally()
    with LLM(
        str(path), device="cuda", dtype="float32", attention_backend="torch", page_size=page_size,
        num_pages=320 // page_size, max_running_requests=7, max_prefill_tokens=40, progress=False,
        cuda_graph_max_rows=max_graph_rows,
    ) as llm:  # fmt: skip
        for some in (cases, cases[:1], cases[::-1]):
            params = [msgspec.structs.replace(case.params, logprobs=3) for case in some]
            prompts = [case.judged.prompt for case in some]
            for case, result in zip(
                some, llm.generate(prompts, params, progress=False), strict=True
            ):
                tally.compare(case.judged, result.token_ids, case.name)
                if result.token_ids != case.judged.tokens:
                    continue
                assert result.logprobs is not None
                for one, row in zip(result.logprobs, case.judged.logprobs, strict=True):
                    assert abs(one.token.logprob - float(row[one.token.token_id])) < 1e-3
                    assert len(one.top) == 3
    tally.check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logprobs_of_a_prompt_do_not_depend_on_its_chunks(wide: Path, dtype: str) -> None:
    prompt, found = prompts_of(3)[2] * 4, []
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2)
    for budget in (32, 4096):
        with LLM(
            str(wide), device="cuda", dtype=dtype, max_prefill_tokens=budget, num_pages=400,
            progress=False,
        ) as llm:  # fmt: skip
            (result,) = llm.generate(prompt, params, progress=False)
            assert result.prompt_logprobs is not None
            found.append([one.token.logprob for one in result.prompt_logprobs if one is not None])
    assert len(found[0]) == len(prompt) - 1
    few, many = found
    assert np.allclose(few, many, atol=0.1 if dtype == "bfloat16" else 1e-3)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "qwen3"
    return write_tiny_model(folder, "Qwen3ForCausalLM", **WIDE)


def backends() -> list[str]:
    """Attention backends that are installed here, by name; those of decode alone as a pair."""
    from minisgl.plugins.host import load_plugins

    offers = load_plugins().attention
    return sorted(
        offer.name if "prefill" in offer.record.capabilities.phases else f"triton,{offer.name}"
        for offer in offers
    )


@pytest.fixture(params=[None, 0], ids=["graphs", "eager"])
def max_graph_rows(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.mark.parametrize("backend", backends())
def test_bfloat16_logits_agree_with_float32_ones(
    wide: Path, backend: str, max_graph_rows: int | None
) -> None:
    """Of every sampled token: prefill in chunks, cached prefixes, decode."""
    exact = _logits(wide, "float32", "torch", 0)
    rounded = _logits(wide, "bfloat16", backend, max_graph_rows)
    assert exact.keys() == rounded.keys()
    differ: set[int] = set()
    num_compared = 0
    for uid, length in sorted(exact):
        if uid in differ:
            continue
        (token, logits), (other_token, other_logits) = exact[uid, length], rounded[uid, length]
        error = (logits - other_logits).norm() / logits.norm()
        assert error < 0.03, f"{backend}: relative error {error:.3f} after {length} tokens"
        num_compared += 1
        if token != other_token:
            differ.add(uid)  # the texts differ from here on
    assert num_compared > 100


Noted = dict[tuple[int, int], tuple[int, torch.Tensor]]
"""By request and number of tokens before: the token, and the logits that it was drawn from."""


def _logits(path: Path, dtype: str, backend: str, max_graph_rows: int | None) -> Noted:
    with LLM(
        str(path), device="cuda", dtype=dtype, attention_backend=backend, num_pages=400,
        max_running_requests=12, max_prefill_tokens=64, progress=False,
        cuda_graph_max_rows=max_graph_rows, scheduler={"overlap": "off"},
    ) as llm:  # fmt: skip
        noted = _note_logits(llm)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate(prompts_of(12), params, progress=False)
    return noted


def _note_logits(llm: LLM) -> Noted:
    """Note token and logits of every sampled row from now on."""
    scheduler = llm._session._scheduler
    engine = scheduler._engine
    assert isinstance(engine, Engine)
    noted: Noted = {}
    forward, launch = engine._model.forward, engine._launch
    kept: list[torch.Tensor] = []

    def note(launched: Launch, tokens: torch.Tensor) -> None:
        uids = scheduler.table.uids[launched.sampled_rows].tolist()
        keys = zip(uids, launched.sampled_ends.tolist(), strict=True)
        logits = kept.pop()[: len(uids)].float().cpu()
        noted.update(zip(keys, zip(tokens.tolist(), logits, strict=True), strict=True))

    def keeping(batch: Batch) -> torch.Tensor:
        kept.append(forward(batch))
        return kept[-1]

    def launched(one: Launch, *rest: Any) -> torch.Tensor:
        tokens = launch(one, *rest)
        note(one, tokens)
        return tokens

    engine._model.forward = keeping  # type: ignore[method-assign]
    if engine.prefill_graphs is not None:
        run = engine.prefill_graphs.run

        def running(batch: Batch) -> torch.Tensor:
            kept.append(run(batch))
            return kept[-1]

        engine.prefill_graphs.run = running  # type: ignore[method-assign]
    engine._launch = launched  # type: ignore[method-assign,assignment]
    if engine.graphs is not None:
        replay, graph_replay = engine._replay, engine.graphs.replay

        def replaying(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logits, tokens = graph_replay(*arguments, **options)
            kept.append(logits)
            return logits, tokens

        def replayed(one: Launch, slot: int) -> torch.Tensor:
            tokens = replay(one, slot)
            note(one, tokens)
            return tokens

        engine.graphs.replay = replaying  # type: ignore[method-assign,assignment]
        engine._replay = replayed  # type: ignore[method-assign,assignment]
    return noted


@pytest.mark.parametrize("seed", [0, 1])
def test_graphs_overlap_and_plain_steps_give_equal_tokens(wide: Path, seed: int) -> None:
    """Of eager and of recorded steps each, overlapped or not; and the two agree within bfloat16.

    A graph pads its rows and may attend through another backend, which changes the order of sums.
    So eager launches judge its texts: each token is the best one after those before it, or as good
    as the best one.
    """
    outputs, prompts = [], prompts_of(12, seed)
    for overlap, rows in (("off", 0), ("on", 0), ("off", None), ("on", None)):
        with LLM(
            str(wide), device="cuda", dtype="bfloat16", num_pages=400, max_running_requests=12,
            progress=False, cuda_graph_max_rows=rows, scheduler={"overlap": overlap},
        ) as llm:  # fmt: skip
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            results = llm.generate(prompts, params, progress=False)
            outputs.append([result.token_ids for result in results])
            if rows is None:
                check_judged(llm, prompts, outputs[-1])
    eager, eager_overlap, graph, graph_overlap = outputs
    assert eager == eager_overlap, "the same launches, only earlier"
    assert graph == graph_overlap


@pytest.mark.parametrize("rows", [None, 0], ids=["graphs", "eager"])
def test_shared_prefixes_are_attended_to_once(
    wide: Path, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy texts of prompts that begin alike are good ones after their whole prompt.

    Catches: a prefix that is left out, merged with wrong weights, or another group's.
    """
    random, told = np.random.default_rng(5), []
    prefixes = [random.integers(3, 259, size=size).tolist() for size in (200, 90)]
    prompts = [
        prefixes[place % 2] + random.integers(3, 259, size=1 + place).tolist()
        for place in range(20)
    ]
    decode = shared_prefix.shared_decode

    def noting(*arguments: Any) -> torch.Tensor:
        told.append(len(arguments[0]))
        return decode(*arguments)

    monkeypatch.setattr("minisgl.attention.triton_backend.shared_decode", noting)
    for mib in (0.0, 1e-4):
        with LLM(
            str(wide), device="cuda", dtype="bfloat16", num_pages=600, max_running_requests=24,
            progress=False, cuda_graph_max_rows=rows, attention_backend="triton",
            attention={"shared_prefix_mib": mib},
        ) as llm:  # fmt: skip
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            for _ in range(2):
                results = llm.generate(prompts, params, progress=False)
            assert bool(told) == (mib > 0)
            check_judged(llm, prompts, [result.token_ids for result in results])


def test_random_requests_with_aborts_and_churn_end_with_all_pages_free(wide: Path) -> None:
    """2,000 requests over a pool that holds a few of them."""
    random = np.random.default_rng(3)
    transport = MemoryTransport()
    scheduler = build_scheduler(
        settings_from_keywords(
            model=str(wide), device="cuda", dtype="bfloat16", num_pages=120,
            max_running_requests=32, max_prefill_tokens=512,
        ),
        transport,
        progress=False,
    )  # fmt: skip
    shared = random.integers(3, 259, size=64).astype(np.int32)
    sent, ended = 0, set()
    while sent < 2000 or scheduler.has_work:
        for _ in range(min(int(random.integers(0, 12)), 2000 - sent)):
            own = random.integers(3, 259, size=int(random.integers(1, 90)), dtype=np.int32)
            prompt = np.concatenate((shared[: 16 * int(random.integers(0, 5))], own))
            kinds = ({"temperature": 0}, {"temperature": 0.9}, {"temperature": 1, "top_p": 0.8})
            params = SamplingParams(
                max_tokens=int(random.integers(1, 60)), seed=sent, **kinds[sent % 3]
            )
            transport.inbox.append(GenerateRequest(sent, prompt.tobytes(), params))
            sent += 1
        if random.random() < 0.3 and sent:
            transport.inbox.append(AbortRequest([int(random.integers(max(0, sent - 40), sent))]))
        scheduler.receive(0)
        scheduler.step()
        batches, transport.outbox = transport.outbox, []
        for batch in batches:
            for uid in batch.finished_uids:
                assert uid not in ended
                ended.add(uid)
    assert ended == set(range(2000))
    assert scheduler.num_retractions > 0, "the pool was not short"
    assert scheduler.num_running == 0
    assert scheduler.cache.num_available == scheduler.cache.num_pages
    scheduler.check()


def test_recorded_prefills_have_the_logits_of_eager_ones(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all sizes, with rows of several lengths, behind cached prefixes, and after longer ones."""
    errors: list[float] = []
    with LLM(
        str(wide), device="cuda", dtype="bfloat16", num_pages=400, max_running_requests=8,
        progress=False, engine={"prefill_graph_max_tokens": 300},
    ) as llm:  # fmt: skip
        assert isinstance(llm.engine, Engine)
        graphs = llm.engine.prefill_graphs
        assert graphs is not None
        run = graphs.run

        def both(batch: Batch) -> torch.Tensor:
            expected = graphs._model.forward(batch).float()
            logits = run(batch)
            error = (logits.float() - expected).norm() / expected.norm().clamp_min(1e-6)
            errors.append(float(error))
            return logits

        monkeypatch.setattr(graphs, "run", both)
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        for length in (290, 1, 16, 17, 33, 64, 100, 200, 256, 299, 3):
            llm.generate(prompts_of(1, seed=length)[:1], params, progress=False)
            random = np.random.default_rng(length)
            prompt = random.integers(3, 259, size=length).tolist()
            llm.generate([prompt], params, progress=False)
        for seed in range(6):
            llm.generate(prompts_of(1 + seed, seed), params, progress=False)
    assert len(errors) >= 22
    assert max(errors) < 0.02, errors
