"""The backend ``triton`` on a card: the contract, real sizes, and an engine that records it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")

from minisgl import LLM, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.moe import MoeBackend, MoeContext, TuneRequest, quantize_rows
from minisgl.testing.moe_contract import MoeBackendContract, Sizes
from minisgl_moe_triton.backend import TritonMoeBackend
from minisgl_moe_triton.configs import Columns, Few, Grouped, Launch, Tile
from minisgl_moe_triton.create import create_backend, key_of
from minisgl_moe_triton.kernels.grouped import gate_up
from minisgl_moe_triton.kernels.quantize import quantize
from minisgl_moe_triton.kernels.routing import Routed, sort_by_expert
from minisgl_moe_triton.settings import TritonMoeSettings
from minisgl_moe_triton.timing import compile_in_parallel
from minisgl_moe_triton.tune import tune
from support.moe_products import check_products
from support.moe_routing import ROUTERS, check_route
from support.moe_sorting import SORTS, check_sort
from support.tiny_models import WIDE, write_tiny_model

pytestmark = pytest.mark.gpu

SMALL = Tile(outputs=64, inputs=64, group=1, stages=3, warps=4, swapped=True)
LARGE = Tile(outputs=128, inputs=64, group=8, stages=3, warps=8, swapped=False)
GATED = Tile(outputs=64, inputs=64, group=8, stages=3, warps=8, swapped=False)
DEEP = Tile(outputs=64, inputs=256, group=1, stages=2, warps=4, swapped=True)
FEW = Few(
    tokens=1, gate_up=Columns(outputs=4, inputs=1024, warps=4),
    down=Columns(outputs=4, inputs=256, warps=4),
)  # fmt: skip


class OnCard(MoeBackendContract):
    device = "cuda"
    dtype = torch.bfloat16
    sizes: ClassVar[Sequence[Sizes]] = (
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


class Fp8OnCard(OnCard):
    """Against float64 of the same quantized values; what is not written is not a number."""

    num_tokens: ClassVar[Sequence[int]] = (1, 64, 500)
    weights_dtype = torch.float8_e4m3fn

    @pytest.fixture(autouse=True)
    def poison(self) -> None:
        """Leave memory that is no number where outputs and rows will be."""
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("does not know float8_e4m3fn")
        poison_memory()


class TestFewTokensInFp8(Fp8OnCard):
    num_tokens = (1, 5)
    launches = (FEW,)


class TestFewTokensInFp8InParts(TestFewTokensInFp8):
    """Rows of more inputs than a program holds at once."""

    launches = (
        Few(
            tokens=1, gate_up=Columns(outputs=2, inputs=64, warps=4),
            down=Columns(outputs=4, inputs=64, warps=4),
        ),
    )  # fmt: skip


class TestSwappedInFp8(Fp8OnCard):
    launches = (Grouped(tokens=1, rows=16, gate_up=SMALL, down=SMALL),)


class TestCopiedInFp8(TestCopied, Fp8OnCard):
    """By the tensor memory accelerator, where the sizes allow it."""


class TestSwappedWideInFp8(Fp8OnCard):
    dtype = torch.float16
    launches = (
        Grouped(tokens=1, rows=64, gate_up=DEEP, down=DEEP.model_copy(update={"outputs": 128})),
    )


class TestStraightInFp8(Fp8OnCard):
    launches = (Grouped(tokens=1, rows=64, gate_up=GATED, down=LARGE),)


class TestFewRowsInFp8(Fp8OnCard):
    """So few rows are no first operand of Hopper's own product."""

    launches = (
        Grouped(
            tokens=1, rows=16, gate_up=GATED, down=GATED.model_copy(update={"group": 1}),
        ),
    )  # fmt: skip


class TestQwen330BA3B(MoeBackendContract):
    """As it is chosen: tuned launches where there are some, else by the rule of thumb."""

    @pytest.fixture(autouse=True)
    def give_back(self) -> Iterator[None]:
        """Workers beside this one need memory, too."""
        yield
        torch.cuda.empty_cache()

    device = "cuda"
    dtype = torch.bfloat16
    sizes: ClassVar[Sequence[Sizes]] = (Sizes(128, 8, 2048, 768),)
    num_tokens: ClassVar[Sequence[int]] = (1, 16, 256, 4096)
    activations = ("silu",)

    def create(self, context: MoeContext) -> MoeBackend:
        return create_backend(context, TritonMoeSettings())


class TestMixtral8x7B(TestQwen330BA3B):
    sizes = (Sizes(8, 2, 4096, 14336),)
    num_tokens = (1, 64, 1000)


class TestQwen330BA3BInFp8(TestQwen330BA3B, Fp8OnCard):
    def create(self, context: MoeContext) -> MoeBackend:
        return create_backend(context, TritonMoeSettings())


class TestMixtral8x7BInFp8(TestQwen330BA3BInFp8):
    sizes = (Sizes(8, 2, 4096, 14336),)
    num_tokens = (1, 64, 1000)


def poison_memory() -> None:
    """Fill what torch has to give, in pieces of all sizes, with what is no number in any dtype."""
    pieces = [
        torch.full((2**size,), 255, dtype=torch.uint8, device="cuda")
        for size in (*range(9, 21), 22, 24, 26)
        for _ in range(8)
    ]
    del pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 33, 768, 2048, 14336])
def test_rows_are_quantized_to_the_bit(dtype: torch.dtype, width: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("does not know float8_e4m3fn")
    rows = torch.randn(300, width, device="cuda")
    rows *= torch.exp(2 * torch.randn(300, width, device="cuda"))
    rows[:3] = torch.tensor([0.0, 1e-4, 1.0], device="cuda")[:, None]
    rows = rows.clamp(-3e4, 3e4).to(dtype)
    values, scales = quantize(rows)
    for expected, of_expected in (quantize_rows(rows), quantize_rows(rows.cpu())):
        assert torch.equal(scales.cpu(), of_expected.cpu())
        found, right = (one.cpu().view(torch.uint8) for one in (values, expected))
        assert torch.equal(found, right)


@pytest.mark.parametrize("size", [Sizes(128, 8, 2048, 768), Sizes(8, 2, 4096, 14336)], ids=str)
@pytest.mark.parametrize("tokens", [6, 300, 3000])
def test_products_in_fp8_are_added_up_exactly(size: Sizes, tokens: int) -> None:
    """With float16 results, whose own error is small: sums of fp8 alone would be off by more."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("does not know float8_e4m3fn")
    poison_memory()
    for tile in (SMALL, LARGE, SMALL.model_copy(update={"inputs": 256, "stages": 2})):
        launch = Grouped(
            tokens=1, rows=64 if tile == LARGE else 32, gate_up=tile, down=tile,
        )  # fmt: skip
        check_products("cuda", torch.float16, size, tokens, launch, 2e-3)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("weights", ["auto", "fp8"])
def test_an_engine_records_it_and_agrees_with_the_reference(tmp_path: Path, weights: str) -> None:
    sizes = {"moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 4}
    path = write_tiny_model(tmp_path / "moe", "Qwen3MoeForCausalLM", **WIDE, **sizes)
    prompts = [[5, 6, 7] * n for n in range(1, 9)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    first = []
    for backend in ("auto", "torch"):
        with LLM(
            str(path), device="cuda", dtype="bfloat16", moe_backend=backend, num_pages=300,
            attention_backend="triton", max_running_requests=8, progress=False,
            moe_weights_dtype=weights,
        ) as llm:  # fmt: skip
            assert isinstance(llm.engine, Engine)
            assert (llm.engine.graphs is not None) == (backend == "auto")
            results = llm.generate(prompts, params, progress=False)
        assert all(len(one.token_ids) == 6 for one in results)
        assert all(one.logprobs is not None for one in results)
        first.append([one.logprobs[0].token.logprob for one in results if one.logprobs])
    # Later tokens may follow another one that was about as likely; in fp8 a rounding may be, too.
    assert first[0] == pytest.approx(first[1], abs=0.1 if weights == "auto" else 0.25)


@pytest.mark.parametrize("suite", [TestQwen330BA3B(), TestQwen330BA3BInFp8()])
@pytest.mark.parametrize("tokens", [1, 3, 16, 100, 2000])
def test_nothing_is_compiled_after_the_start(tokens: int, suite: TestQwen330BA3B) -> None:
    from triton import knobs

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


def test_tuning_in_threads_without_a_context_finds_what_can_run() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("has no tensor memory accelerator")
    suite = TestQwen330BA3B()
    x = torch.randn(64, 2048, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(128, 2 * 768, 2048, dtype=torch.bfloat16, device="cuda")
    experts = torch.randint(128, (64, 8), dtype=torch.int32, device="cuda")
    routed = Routed(experts, torch.rand(64, 8, device="cuda"))
    tiles = sort_by_expert(routed, 128, 16)
    tile = SMALL.model_copy(update={"tma": True})
    call = partial(gate_up, x, weight, tiles, suite.sizes[0].top_k, tile, gelu=False)
    call()
    assert compile_in_parallel([call] * 64) == [True] * 64


@pytest.mark.parametrize("sort", SORTS, ids=lambda sort: "-".join(map(str, sort[:2])))
def test_rows_and_tiles(sort: tuple[int, int, range, int, int, float]) -> None:
    check_sort("cuda", *sort)


@pytest.mark.parametrize(("dtype", "experts", "top_k"), ROUTERS)
def test_the_likeliest_experts(dtype: torch.dtype, experts: int, top_k: int) -> None:
    check_route("cuda", dtype, experts, top_k)


def test_tuning_experts_in_fp8_writes_a_file_of_their_own(tmp_path: Path) -> None:
    suite = TestMixtral8x7BInFp8()
    context = replace(
        suite.context(Sizes(8, 2, 512, 256)), weights_dtype=torch.float8_e4m3fn, max_num_tokens=64
    )
    request = TuneRequest(tokens=(1, 64), folder=tmp_path, time_limit_s=4, progress=False)
    tune(context, TritonMoeSettings(), request)
    (file,) = tmp_path.iterdir()
    assert "float8_e4m3fn" in file.name
    assert file.name == key_of(context).file_name
