"""The backend ``triton`` on a card: the contract, real sizes, and an engine that records it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")

from minisgl import LLM, SamplingParams
from minisgl.moe import MoeBackend, MoeContext
from minisgl.testing.moe_contract import MoeBackendContract, Sizes
from minisgl_moe_triton.backend import TritonMoeBackend
from minisgl_moe_triton.configs import Columns, Few, Grouped, Launch, Tile
from minisgl_moe_triton.create import create_backend
from minisgl_moe_triton.settings import TritonMoeSettings
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.gpu

SMALL = Tile(outputs=64, inputs=64, group=1, stages=3, warps=4, swapped=True)
LARGE = Tile(outputs=128, inputs=64, group=8, stages=3, warps=8, swapped=False)
GATED = Tile(outputs=64, inputs=64, group=8, stages=3, warps=8, swapped=False)
FEW = Few(
    tokens=1, gate_up=Columns(outputs=4, inputs=1024, warps=4),
    down=Columns(outputs=4, inputs=256, warps=4),
)  # fmt: skip


class OnCard(MoeBackendContract):
    device = "cuda"
    dtype = torch.bfloat16
    sizes = (
        Sizes(8, 2, 256, 128),
        Sizes(64, 6, 512, 192),
        Sizes(5, 3, 72, 40),
        Sizes(6, 1, 33, 17),
    )
    num_tokens: ClassVar[Sequence[int]] = (1, 7, 64, 500)
    launches: ClassVar[tuple[Launch, ...]]

    def create(self, context: MoeContext) -> MoeBackend:
        return TritonMoeBackend(context, self.launches)


class TestFewTokens(OnCard):
    num_tokens = (1, 5)
    launches = (FEW,)


class TestSwapped(OnCard):
    launches = (Grouped(tokens=1, rows=16, gate_up=SMALL, down=SMALL),)


class TestCopied(OnCard):
    """By the tensor memory accelerator, where the sizes allow it."""

    launches = (
        Grouped(
            tokens=1, rows=32, gate_up=SMALL.model_copy(update={"tma": True}),
            down=LARGE.model_copy(update={"tma": True, "outputs": 64}),
        ),
    )  # fmt: skip

    def create(self, context: MoeContext) -> MoeBackend:
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("has no tensor memory accelerator")
        return super().create(context)


class TestSwappedWide(OnCard):
    dtype = torch.float16
    launches = (Grouped(tokens=1, rows=64, gate_up=SMALL, down=SMALL),)


class TestStraight(OnCard):
    launches = (Grouped(tokens=1, rows=64, gate_up=GATED, down=LARGE),)


class TestQwen330BA3B(MoeBackendContract):
    """As it is chosen: tuned launches where there are some, else by the rule of thumb."""

    device = "cuda"
    dtype = torch.bfloat16
    sizes = (Sizes(128, 8, 2048, 768),)
    num_tokens: ClassVar[Sequence[int]] = (1, 16, 256, 4096)
    activations = ("silu",)

    def create(self, context: MoeContext) -> MoeBackend:
        return create_backend(context, TritonMoeSettings())


class TestMixtral8x7B(TestQwen330BA3B):
    sizes = (Sizes(8, 2, 4096, 14336),)
    num_tokens = (1, 64, 1000)


def test_an_engine_records_it_and_agrees_with_the_reference(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "moe", "Qwen3MoeForCausalLM")
    prompts = [list(range(3, 40)), [9, 8, 7], [5] * 20]
    answers = []
    for backend in ("triton", "torch"):
        with LLM(
            str(path), moe_backend=backend, dtype="bfloat16", num_pages=100, progress=False
        ) as llm:
            results = llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=8, logprobs=5), progress=False
            )
        answers.append([result.logprobs for result in results])
    for fast, right in zip(*answers, strict=True):
        # Tokens of equal probability may part the two later; the first is of the prompt alone.
        assert fast is not None
        assert right is not None
        assert abs(fast[0].logprob - right[0].logprob) < 0.05


@pytest.mark.parametrize("tokens", [1, 3, 16, 100, 2000])
def test_nothing_is_compiled_after_the_start(tokens: int) -> None:
    from triton import knobs

    suite = TestQwen330BA3B()
    context = replace(suite.context(suite.sizes[0]), max_num_tokens=2048)
    backend = suite.create(context)
    inputs = suite.inputs(suite.sizes[0], tokens)
    compiled: list[object] = []
    knobs.runtime.jit_post_compile_hook = lambda *_, **facts: compiled.append(facts)
    try:
        inputs.run(backend)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert compiled == []
