"""What is tried out before the pool is sized, on a GPU that is not there."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.bootstrap import build_scheduler, memory
from minisgl.bootstrap import engine as bootstrap_engine
from minisgl.bootstrap.memory import make_runner, plan_pool, rehearsed
from minisgl.bootstrap.stages import Stages
from minisgl.engine.control_state import control_bytes
from minisgl.engine.info import EngineInfo
from minisgl.engine.memory_plan import DeviceMemory, Needs
from minisgl.errors import DoesNotFitError
from minisgl.kernel.ops import OpTable
from minisgl.layers.context import BuildContext
from minisgl.models.interface import BaseLLMModel
from minisgl.moe.interface import MoeContext
from minisgl.moe.torch_backend import TorchMoeBackend
from minisgl.scheduler.transport import MemoryTransport
from minisgl.settings import Settings, settings_from_keywords
from support.forward import load_model, load_through_transformers
from support.tiny_models import write_tiny_model

GIB = 2**30
CUDA = torch.device("cuda", 0)


class EagerModel(BaseLLMModel):
    """A plugin's model that cannot be recorded."""

    supports_cuda_graphs = False

    def __init__(self) -> None:
        """Has no layers."""

    def forward(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")


@pytest.fixture
def model(tiny: Path) -> BaseLLMModel:
    return load_model(tiny)[0]


MOE = MoeContext(
    device=CUDA, dtype=torch.float32, num_experts=4, top_k=2, hidden_size=8, intermediate_size=8,
    activation="silu", max_num_tokens=16,
)  # fmt: skip


@pytest.fixture
def context(tiny: Path) -> BuildContext:
    """As on a card: a backend with graphs, and operations of its own at the head of a step."""
    context = load_model(tiny)[1]
    context.attention.cuda_graphs = SimpleNamespace()  # type: ignore[assignment]
    ops = OpTable(apply_plan=lambda words, rows: None)
    return replace(context, device=CUDA, ops=ops)


@pytest.fixture(autouse=True)
def _sizes_for_a_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one asks the driver for memory at once."""

    def sizes_of(
        model: object,
        attention: object,
        state: object,
        sizes: list[int],
        *,
        shared_sizes: list[int],
    ) -> list[int]:
        assert shared_sizes == [], "this engine has no use for groups"
        return sizes

    monkeypatch.setattr(memory, "GraphRunner", sizes_of)


def settings_for(**keywords: Any) -> Settings:
    return settings_from_keywords(model="none", environ={}, **keywords)


def info_of(max_running_requests: int) -> EngineInfo:
    return EngineInfo(
        architecture="Tiny", device="cuda:0", dtype="float32", vocab_size=263, eos_token_ids=(0,),
        max_seq_len=64, max_running_requests=max_running_requests, page_size=4, num_pages=1,
        mixed_launches=False, asynchronous=True,
    )  # fmt: skip


def runner_of(model: BaseLLMModel, context: BuildContext, rows: int = 20, **keywords: Any) -> Any:
    """What ``make_runner`` returns for ``rows`` requests: the sizes, or nothing."""
    settings = settings_for(**keywords.pop("settings", {}))
    engine: Any = SimpleNamespace(info=info_of(rows), state=None)
    return make_runner(settings, model, context, engine, **keywords)


def test_graphs_reach_to_all_rows_or_to_the_setting(
    model: BaseLLMModel, context: BuildContext, caplog: pytest.LogCaptureFixture
) -> None:
    assert runner_of(model, context) == [1, 2, 4, 8, 16, 20]
    assert runner_of(model, context, settings={"cuda_graph_max_rows": 3}) == [1, 2, 3]
    assert runner_of(model, context, settings={"cuda_graph_max_rows": 99})[-1] == 20
    assert not caplog.records


def test_nobody_is_told_of_graphs_that_are_not_wanted(
    model: BaseLLMModel, context: BuildContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "minisgl"):
        assert runner_of(model, replace(context, device=torch.device("cpu"))) is None
        assert runner_of(EagerModel(), context, settings={"cuda_graph_max_rows": 0}) is None
    assert not caplog.records


def test_each_reason_against_graphs_is_a_warning(
    model: BaseLLMModel, context: BuildContext, caplog: pytest.LogCaptureFixture
) -> None:
    assert runner_of(EagerModel(), context) is None
    assert runner_of(model, replace(context, ops=OpTable())) is None
    moe: Any = TorchMoeBackend(MOE)
    assert runner_of(model, replace(context, moe=moe)) is None
    moe.cuda_graphs = True
    assert runner_of(model, replace(context, moe=moe)) is not None
    context.attention.cuda_graphs = None
    assert runner_of(model, context) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    slower = "decode runs without CUDA graphs, which is slower: "
    assert [record.getMessage() for record in caplog.records] == [
        f"{slower}EagerModel runs eagerly",
        f"{slower}the operations at the head of a graph need Triton",
        f"{slower}TorchMoeBackend chooses what it launches by the routing",
        f"{slower}the attention backend takes no part in them",
    ]


def test_a_rehearsal_says_nothing_that_the_start_says_again(
    context: BuildContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "minisgl"):
        assert runner_of(EagerModel(), context, rehearsal=True) is None
    assert not caplog.records


def test_whoever_runs_through_transformers_is_warned_once_and_elsewhere(
    tiny: Path, context: BuildContext, caplog: pytest.LogCaptureFixture
) -> None:
    through, _ = load_through_transformers(tiny)
    with caplog.at_level(logging.INFO, "minisgl"):
        assert runner_of(through, context) is None
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "TransformersModel runs eagerly" in record.getMessage()


def test_a_step_that_runs_out_of_memory_names_its_size_and_the_settings(
    model: BaseLLMModel, context: BuildContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    monkeypatch.setattr(memory, "Engine", engine)
    settings = settings_for(max_prefill_tokens=777)
    message = (
        r"a step of scheduler\.max_prefill_tokens=777 tokens and scheduler\.max_running_requests="
        r"20 requests needs more memory than the weights leave on cuda:0; lower one of them, or "
        r"engine\.cuda_graph_max_rows \(CUDA out of memory\. Tried to allocate 3\.00 GiB\.\)"
    )
    rehearsal = rehearsed(settings, model, context, info_of(20))
    with pytest.raises(DoesNotFitError, match=message), rehearsal:
        pytest.fail("nothing is sized after that")


class Prefills:
    """Recorded prefills, and how they are given back."""

    def __init__(self, card: "Card") -> None:
        self._card = card
        self.forgotten = False

    def record(self, progress: Any) -> None:
        self._card.allocated += GIB // 4

    def forget(self) -> None:
        self._card.allocated -= GIB // 4
        self.forgotten = True


class Card:
    """Memory of a device: what is allocated, by whom, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = 3 * GIB
        self.peak = 0
        self.warmed_up: list[tuple[int, bool]] = []
        self.forgotten = False
        functions = {
            "reset_peak_memory_stats": lambda _: setattr(self, "peak", self.allocated),
            "memory_allocated": lambda _: self.allocated,
            "max_memory_allocated": lambda _: self.peak,
            "empty_cache": lambda: None,
            "synchronize": lambda _: None,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(memory, "Engine", lambda *_: self)
        monkeypatch.setattr(memory, "make_runner", lambda *_, **__: self)
        self.prefills = Prefills(self)
        monkeypatch.setattr(memory, "make_prefill_graphs", self.make_prefill_graphs)
        monkeypatch.setattr(memory, "measure", self.measure)

    def measure(self, device: torch.device) -> DeviceMemory:
        assert device == CUDA
        return DeviceMemory(total=10 * GIB, free=10 * GIB - self.allocated)

    def warm_up(self, num_tokens: int, *, filtered: bool, controlled: bool) -> None:
        assert filtered, "that takes most"
        self.warmed_up.append((num_tokens, controlled))
        self.peak = self.allocated + 2 * GIB

    def make_prefill_graphs(self, *_: Any, largest_only: bool) -> "Prefills":
        assert largest_only
        return self.prefills

    def on_stream(self) -> Any:
        return torch.inference_mode()

    def record_largest(self) -> None:
        self.allocated += GIB // 2

    def forget(self) -> None:
        self.allocated -= GIB // 2
        self.forgotten = True


def test_the_largest_steps_are_measured_and_graphs_held_meanwhile(
    model: BaseLLMModel, context: BuildContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch)
    settings = settings_for(max_prefill_tokens=777)
    with rehearsed(settings, model, context, info_of(20)) as needs:
        assert needs == Needs(
            activations=2 * GIB, graphs=3 * GIB // 4, controls=control_bytes(20, 263, 1)
        )
        assert card.warmed_up == [(777, False), (777, True)]
        assert context.kv_pool.num_pages == 2
        assert not card.forgotten, "the caller measures the device now"
        assert not card.prefills.forgotten
    assert card.forgotten
    assert card.prefills.forgotten


def test_nothing_is_tried_out_on_a_cpu(model: BaseLLMModel, context: BuildContext) -> None:
    on_cpu = replace(context, device=torch.device("cpu"))
    before = context.kv_pool.num_pages
    with rehearsed(settings_for(), model, on_cpu, info_of(20)) as needs:
        assert needs == Needs(controls=control_bytes(20, 263, 1))
    assert context.kv_pool.num_pages == before


def test_the_pool_leaves_room_for_what_was_measured(
    model: BaseLLMModel, context: BuildContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "measure", lambda _: DeviceMemory(total=GIB, free=GIB // 2))
    settings = settings_for(memory_fraction=0.9, num_pages=None)

    def pages(needs: Needs) -> int:
        plan = plan_pool(
            settings, model, context.kv_pool, context.communicator, max_seq_len=10**9, needs=needs
        )
        return plan.num_pages

    page = type(context.kv_pool).bytes_per_page(context.kv_pool.spec)
    assert pages(Needs()) - pages(Needs(activations=100 * page)) == 100


def test_a_pool_too_small_for_the_wanted_length_names_the_settings(
    model: BaseLLMModel, context: BuildContext
) -> None:
    settings = settings_for(num_pages=3, max_seq_len=64)
    with pytest.raises(DoesNotFitError, match=r"model\.max_seq_len=64 needs 16 pages, .* has 3 of"):
        plan_pool(
            settings, model, context.kv_pool, context.communicator, max_seq_len=64, needs=Needs()
        )


@pytest.mark.parametrize(
    ("device", "most", "expected"),
    [
        ("cuda", 8192, [1, 16, 64, 128, 256, 8192]),
        ("cuda", 64, [1, 16, 64]),
        ("cuda", 1, [1]),
        ("cpu", 8192, [1]),
    ],
)
def test_every_kernel_runs_before_the_first_request_with_or_without_graphs(
    model: BaseLLMModel, context: BuildContext, device: str, most: int, expected: list[int]
) -> None:
    """Catches: a request that waits for the compiler, as its step is the first of few tokens."""
    warmed_up: list[int] = []

    def warm_up(num_tokens: int, *, filtered: bool = False, controlled: bool = False) -> None:
        if not filtered and not controlled:
            warmed_up.append(num_tokens)

    engine: Any = SimpleNamespace(info=info_of(20), state=None, warm_up=warm_up)
    settings = settings_for(max_prefill_tokens=most, cuda_graph_max_rows=0)
    on_device = replace(context, device=torch.device(device))
    bootstrap_engine._warm_up(engine, settings, model, on_device, Stages(), progress=False)
    assert warmed_up == expected


def test_weights_that_do_not_fit_end_the_start_with_what_to_change(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a traceback of the allocator, and the exit code of a crash."""

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    monkeypatch.setattr("minisgl.layers.base.Layer.declare", full)
    with pytest.raises(DoesNotFitError, match=r"weights of LlamaForCausalLM in float32 need more .*"
                       r"model\.dtype.*engine\.device.*3 GiB"):  # fmt: skip
        build_scheduler(settings_from_keywords(model=str(tiny)), MemoryTransport(), progress=False)
