"""Invariant 17 (DESIGN section 7): outputs of real rows do not depend on padding.

No launch of the CPU engine is padded; this holds for the model, its layers and the pool what
launches of a fixed size, such as CUDA graphs, will rely on.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minisgl.attention.batch import Batch
from minisgl.layers.context import BuildContext
from minisgl.models.interface import BaseLLMModel
from support.examples import scaled
from support.forward import load_model, make_batch
from support.tiny_models import VOCAB_SIZE, write_tiny_model

Loaded = tuple[BaseLLMModel, BuildContext]
TOKEN = st.integers(0, VOCAB_SIZE - 1)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A dense model, and one whose padded rows are routed to experts too."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), request.param)
    return load_model(folder, max_seq_len=64)


def padded(context: BuildContext, batch: Batch, token_ids: list[int]) -> Batch:
    """Append decode rows of length 1 that point at the dummy page and store nothing."""
    num = len(token_ids)
    dummy_row = batch.page_table.shape[0]
    longer = replace(
        batch,
        input_ids=torch.cat((batch.input_ids, torch.tensor(token_ids, dtype=torch.int64))),
        positions=torch.cat((batch.positions, torch.zeros(num, dtype=torch.int64))),
        slots=torch.cat((batch.slots, torch.full((num,), -1))),
        rows=torch.cat((batch.rows, torch.full((num,), dummy_row))),
        num_decode_rows=batch.num_decode_rows + num,
        query_lens=np.append(batch.query_lens, np.ones(num, dtype=np.int32)),
        kv_lens=np.append(batch.kv_lens, np.ones(num, dtype=np.int32)),
        page_table=torch.nn.functional.pad(batch.page_table, (0, 0, 0, 1)),
    )
    longer.plan = context.attention.plan(longer, 0)
    return longer


def pool_of(context: BuildContext) -> list[torch.Tensor]:
    """K and V of all layers."""
    layers = range(context.kv_pool.spec.num_layers)
    return [part for index in layers for part in context.kv_pool.layer(index)]


@example(prompts=[[0]], padding=[0], rubbish=50.0)
@given(
    prompts=st.lists(st.lists(TOKEN, min_size=1, max_size=20), min_size=1, max_size=4),
    padding=st.lists(TOKEN, min_size=1, max_size=5),
    rubbish=st.sampled_from([0.0, 50.0]),
)
@settings(max_examples=scaled(60))  # an example is three forward passes of a real model
def test_invariant_17_real_rows_do_not_see_padding(
    loaded: Loaded, prompts: list[list[int]], padding: list[int], rubbish: float
) -> None:
    """The same logits with and without padded rows, and nothing but the dummy page is written.

    Catches: slot -1 that wraps around to the pool's last page, a dummy page that real rows read,
    padded tokens that take part in a real row's attention or experts.
    """
    model, context = loaded
    with torch.inference_mode():
        for part in pool_of(context):
            part.fill_(rubbish)
        model.forward(make_batch(context, prompts, [0] * len(prompts), decode=False))
        lengths = [len(prompt) for prompt in prompts]
        batch = make_batch(context, [prompt[-1:] for prompt in prompts], lengths, decode=True)
        expected: Any = model.forward(batch).clone()
        pages = [part[1:].clone() for part in pool_of(context)]
        logits = model.forward(padded(context, batch, padding))[: len(prompts)]
        # Sums over more rows may be added up in another order.
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for part, before in zip(pool_of(context), pages, strict=True):
            torch.testing.assert_close(part[1:], before, rtol=1e-4, atol=1e-5)
