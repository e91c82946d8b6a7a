"""Steps of an engine by hand: rows that ask for nothing beside rows with controls and masks.

Which tokens are right is decided by plain loops over the very logits of each step, so roundings of
the model are no matter; and plans do not depend on tokens, so that steps can be launched ahead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl import SamplingParams
from minisgl.attention.batch import Batch
from minisgl.bootstrap import build_scheduler
from minisgl.engine.controls import FOREVER, RowControls, encode_controls
from minisgl.engine.engine import Engine
from minisgl.engine.plan import CHUNK, ROW_PARAMS, BatchPlan
from minisgl.models.interface import BaseLLMModel
from minisgl.scheduler.transport import MemoryTransport
from minisgl.settings import settings_from_keywords
from support.controlled import controlled
from support.op_checks import check_tokens
from support.tiny_models import VOCAB_SIZE as VOCAB

PAGE_SIZE = 16
ROWS = 6
GREEDY, SAMPLED, FILTERED, PENALIZED, MASKED, BOTH = range(ROWS)

PARAMS = {
    GREEDY: SamplingParams(temperature=0),
    SAMPLED: SamplingParams(temperature=1, seed=5),
    FILTERED: SamplingParams(temperature=1.5, top_k=40, top_p=0.8, seed=6),
    PENALIZED: SamplingParams(
        temperature=0, presence_penalty=1.5, frequency_penalty=0.8, repetition_penalty=1.4
    ),
    MASKED: SamplingParams(temperature=0),
    BOTH: SamplingParams(
        temperature=0,
        repetition_penalty=1.8,
        logit_bias={7: 3.0, 11: -100},
        allowed_token_ids=tuple(range(5, 200)),
    ),
}
CONTROLLED = (PENALIZED, BOTH)
WITH_MASKS = (MASKED, BOTH)


@dataclass
class Step:
    """What one step drew, and from what: the model's logits, float32 ``[ROWS, vocab]``."""

    tokens: list[int]
    logits: torch.Tensor


def engine_for(path: Path, **settings: Any) -> Engine:
    """Return an engine with just so many rows, so that no graph has padding."""
    engine = build_scheduler(
        settings_from_keywords(
            model=str(path), page_size=PAGE_SIZE, num_pages=64, max_running_requests=ROWS,
            max_prefill_tokens=256, **settings,
        ),
        MemoryTransport(),
        progress=False,
    )._engine  # fmt: skip
    assert isinstance(engine, Engine)
    return engine


def prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(3, 259, size=7 + 5 * row).tolist() for row in range(ROWS)]


def may_come(row: int, step: int) -> list[int]:
    """Return the tokens that a row's mask names."""
    return [token for token in range(5, 200) if (token + row + step) % 3]


def plans(engine: Engine, num_steps: int, *, asks: bool) -> Iterator[BatchPlan]:
    """Yield a prefill of all rows, then decode steps; without ``asks`` no row asks for anything."""
    first = engine._next_plan
    order = np.arange(ROWS, dtype=np.int32)
    for step in range(num_steps):
        fields: dict[str, Any] = {"number": first + step}
        if asks:
            fields["mask_rows"] = np.array(WITH_MASKS, dtype=np.int32)
            fields["masks"] = np.stack([_bits(may_come(row, step)) for row in WITH_MASKS])
        if not step:
            fields.update(_prefill(num_steps, asks=asks))
        else:
            fields["num_decode_rows"] = ROWS
            fields["decode_rows"] = order if step == 1 else None
        yield BatchPlan(**fields)


def run(engine: Engine, some: Iterator[BatchPlan]) -> list[Step]:
    """Launch each step before the tokens of the one before are read."""
    with _noted_logits(engine) as noted:
        tokens = run_ahead(engine, some)
    if noted[0].is_cuda:
        torch.cuda.synchronize()
    return [Step(one, logits.cpu()) for one, logits in zip(tokens, noted, strict=True)]


def run_ahead(engine: Engine, some: Iterator[BatchPlan]) -> list[list[int]]:
    """Do the same; returns the tokens alone."""
    tokens, pending = [], None
    for plan in some:
        launched = engine.forward_batch(plan)
        if pending is not None:
            tokens.append(pending.tokens().tolist())
            pending.reports()
        pending = launched
    assert pending is not None
    return [*tokens, pending.tokens().tolist()]


def check(steps: list[Step], *, asks: bool) -> None:
    """Check every token against the logits that it was drawn from."""
    texts = prompts()
    for row in range(ROWS):
        params, num_prompt, num_changed = PARAMS[row], len(texts[row]), 0
        plain = SamplingParams(temperature=params.temperature)
        for number, step in enumerate(steps):
            output = [one.tokens[row] for one in steps[:number]]
            token, logits = step.tokens[row], step.logits[row].tolist()
            if params.temperature:
                _check_sampled(params, token, step.logits[row], num_prompt + number)
                continue
            changed = controlled(logits, texts[row], output, params if asks else plain, set())
            if asks and row in WITH_MASKS:
                may = may_come(row, number)
                changed = [x if i in may else float("-inf") for i, x in enumerate(changed)]
            assert changed[token] >= max(changed) - 1e-4, f"row {row}, step {number}: {token}"
            num_changed += logits.index(max(logits)) != token
        if asks and row in (*CONTROLLED, *WITH_MASKS):
            assert num_changed, f"what row {row} asks for has changed nothing"


def _check_sampled(params: SamplingParams, token: int, logits: torch.Tensor, place: int) -> None:
    columns = (
        (params.temperature, torch.float32), (params.top_k, torch.int64),
        (params.top_p, torch.float32), (params.min_p, torch.float32),
        (params.seed, torch.int64), (place, torch.int64),
    )  # fmt: skip
    some = [torch.tensor([value], dtype=dtype) for value, dtype in columns]
    check_tokens(torch.tensor([token]), logits.unsqueeze(0), *some)


def _prefill(num_steps: int, *, asks: bool) -> dict[str, Any]:
    texts = prompts()
    added, chunks = np.zeros(ROWS, dtype=ROW_PARAMS), np.zeros(ROWS, dtype=CHUNK)
    added["row"] = chunks["row"] = np.arange(ROWS)
    for row, params in PARAMS.items():
        for name in ("temperature", "top_k", "top_p", "min_p"):
            added[name][row] = getattr(params, name)
        added["seed"][row] = params.seed or 0
        chunks[row] = (row, 0, len(texts[row]), 1)
    writes, page = [], 1
    for row, text in enumerate(texts):
        for column in range(-(-(len(text) + num_steps) // PAGE_SIZE)):
            writes.append((row, column, page))
            page += 1
    records = [_record(row, texts[row]) for row in CONTROLLED] if asks else []
    return {
        "added": added,
        "controls": encode_controls(records),
        "table_writes": np.array(writes, dtype=np.int32),
        # None of an earlier round decodes any more.
        "decode_rows": np.empty(0, dtype=np.int32),
        "chunks": chunks,
        "token_ids": np.concatenate(texts).astype(np.int32),
    }


def _record(row: int, prompt: list[int]) -> RowControls:
    params = PARAMS[row]
    biases = [float("-inf") if bias == -100 else bias for bias in params.logit_bias.values()]
    allowed = params.allowed_token_ids
    return RowControls(
        row=row,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        logprobs=3,
        bias_tokens=np.array(list(params.logit_bias), dtype=np.int32),
        bias_until=np.full(len(biases), FOREVER, dtype=np.int32),
        bias_values=np.array(biases, dtype=np.float32),
        allowed=np.empty(0, dtype=np.int32) if allowed is None else _bits(list(allowed)),
        prompt=np.array(prompt, dtype=np.int32),
    )


def _bits(tokens: list[int]) -> npt.NDArray[np.int32]:
    flags = np.zeros(-(-VOCAB // 32) * 32, dtype=np.bool_)
    flags[tokens] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


@contextmanager
def _noted_logits(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """Keep a copy of what each launch's rows are drawn from, recorded or not."""
    noted: list[torch.Tensor] = []
    model, graphs, prefills = engine._model, engine.graphs, engine.prefill_graphs

    class Noting:
        """The model, of which a runner of graphs has its own reference."""

        def forward(self, batch: Batch) -> torch.Tensor:
            logits: torch.Tensor = model.forward(batch)
            noted.append(logits.float().clone())
            return logits

    noting: Any = Noting()
    engine._model = noting
    if graphs is not None:
        replay = graphs.replay

        def replaying(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logits, tokens = replay(*arguments, **options)
            noted.append(logits.float().clone())
            return logits, tokens

        graphs.replay = replaying  # type: ignore[method-assign,assignment]
    if prefills is not None:
        run = prefills.run

        def running(batch: Batch) -> torch.Tensor:
            logits = run(batch)
            noted.append(logits.float().clone())
            return logits

        prefills.run = running  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        assert isinstance(model, BaseLLMModel)
        engine._model = model
        if graphs is not None:
            del graphs.replay
        if prefills is not None:
            del prefills.run
