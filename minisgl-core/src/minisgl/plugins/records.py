"""The typed, frozen records that hooks return. Nothing here imports torch.

Dtypes are spelled as strings (``"bfloat16"``) and devices as their torch type (``"cuda"``), so
that records can be listed on a machine without either.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from minisgl.request import ReasoningTags

if TYPE_CHECKING:
    from minisgl.attention.interface import AttentionBackend, AttentionContext
    from minisgl.kvcache.interface import KVCachePool, KVPoolSpec, PrefixCache
    from minisgl.moe.exchange import ExchangeContext, ExpertExchange
    from minisgl.moe.interface import MoeBackend, MoeContext, TuneRequest
    from minisgl.parsing.interface import ParserContext, TextParser
    from minisgl.structured.interface import GrammarBackend, GrammarContext

Phase = Literal["prefill", "decode"]

KVLayout = Literal["NHD", "HND"]
"""How K and V lie within a page: by token and then by head, or by head and then by token."""


class NoSettings(BaseModel):
    """The settings class of a backend that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SettingsT = TypeVar("SettingsT", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendQuery:
    """What a backend is asked to run on; a probe answers whether it can.

    Attributes:
        device: torch device type: ``cpu``, ``cuda``.
        compute_capability: of a CUDA device, such as ``(9, 0)``; ``None`` elsewhere.
        dtype: of activations, such as ``bfloat16``.
        kv_dtype: of stored K and V.
        page_size: tokens a page.
        kv_layout: of the KV pool's pages.
        num_q_heads, num_kv_heads, head_dim: of one rank.
        sliding_window: whether any layer uses one.
        logit_soft_cap: whether any layer uses one.
        num_experts: routed experts a layer; 0 for a dense model.
        tensor_parallel_size: number of ranks.
        expert_parallel_size: groups of them that experts are spread over.
        moe_weights_dtype: of quantized experts, such as ``float8_e4m3fn``; ``None``: ``dtype``.
    """

    device: str
    compute_capability: tuple[int, int] | None
    dtype: str
    kv_dtype: str
    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: bool = False
    logit_soft_cap: bool = False
    num_experts: int = 0
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    kv_layout: KVLayout = "NHD"
    moe_weights_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Supported:
    """The backend can run; ranks order the candidates of ``auto``, a higher one wins.

    ``None`` for a phase means that the backend does not serve it. Core's torch reference has 0.
    Ranks of attention backends that were measured are percentages of the fastest one's speed, see
    ``RankTable``; ``source`` says where they come from, for ``minisgl plugins explain``.
    """

    prefill_rank: int | None
    decode_rank: int | None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The backend cannot run here; ``reason`` names the value it needs and the value found."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares about itself; ``None`` means any.

    Attributes:
        phases: of ``prefill`` and ``decode``.
        page_sizes, dtypes, kv_dtypes, head_dims: the values it takes.
        kv_layout: of the pages that an attention backend reads, or that a KV pool has.
        devices: torch device types.
        min_compute_capability: of CUDA devices.
        cuda_graphs: whether decode can be captured.
        mixed_batches: whether one launch may hold decode and prefill rows.
        sliding_window, logit_soft_cap: whether it implements them.
    """

    phases: tuple[Phase, ...] = ("prefill", "decode")
    page_sizes: tuple[int, ...] | None = None
    kv_layout: KVLayout = "NHD"
    dtypes: tuple[str, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    devices: tuple[str, ...] | None = None
    min_compute_capability: tuple[int, int] | None = None
    cuda_graphs: bool = False
    mixed_batches: bool = False
    sliding_window: bool = False
    logit_soft_cap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackendRecord(Generic[SettingsT]):
    """An attention backend on offer.

    ``create`` is the one place that imports the kernel package. ``probe`` may, after the cheap
    checks; capabilities are checked by core before it is called.
    """

    name: str
    summary: str
    settings_type: type[SettingsT]
    probe: Callable[[BackendQuery], Supported | Unsupported]
    create: "Callable[[AttentionContext, SettingsT], AttentionBackend]"
    capabilities: Capabilities = field(default_factory=Capabilities)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeBackendRecord(Generic[SettingsT]):
    """An MoE backend on offer; the larger of its two ranks counts.

    Attributes:
        tune: searches for the fastest launches for layers of these sizes, leaves them where
            ``create`` looks with the same settings, and returns what it found and where it lies,
            for people; ``None`` if there is nothing to tune.
        weights_dtypes: of quantized experts that it runs, such as ``float8_e4m3fn``: what its
            ``run_experts`` takes ``scales`` for, see ``MoeBackend``.
    """

    name: str
    summary: str
    settings_type: type[SettingsT]
    probe: Callable[[BackendQuery], Supported | Unsupported]
    create: "Callable[[MoeContext, SettingsT], MoeBackend]"
    capabilities: Capabilities = field(default_factory=Capabilities)
    tune: "Callable[[MoeContext, SettingsT, TuneRequest], str] | None" = None
    weights_dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchangeRecord(Generic[SettingsT]):
    """An exchange of tokens between ranks that hold different experts, on offer.

    The larger of its two ranks counts; one is created only under expert parallelism.
    """

    name: str
    summary: str
    settings_type: type[SettingsT]
    probe: Callable[[BackendQuery], Supported | Unsupported]
    create: "Callable[[ExchangeContext, SettingsT], ExpertExchange]"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolRecord(Generic[SettingsT]):
    """A KV pool on offer."""

    name: str
    summary: str
    settings_type: type[SettingsT]
    probe: Callable[[BackendQuery], Supported | Unsupported]
    create: "Callable[[KVPoolSpec, SettingsT], KVCachePool]"
    capabilities: Capabilities = field(default_factory=Capabilities)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheRecord(Generic[SettingsT]):
    """A prefix cache on offer; ``create`` is given the page size."""

    name: str
    summary: str
    settings_type: type[SettingsT]
    create: "Callable[[int, SettingsT], PrefixCache]"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBackendRecord(Generic[SettingsT]):
    """A grammar engine on offer: it says which tokens may come next in a text of a given form.

    Attributes:
        probe: returns its rank, or why it cannot run here; called once, in the scheduler's process.
        create: the one place that imports the engine's package; called beside the scheduler's
            thread with the first request that has a grammar.
    """

    name: str
    summary: str
    settings_type: type[SettingsT]
    probe: Callable[[], int | Unsupported]
    create: "Callable[[GrammarContext, SettingsT], GrammarBackend]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A family of model architectures, all lazy.

    Attributes:
        architectures: names as in ``config.json``, such as ``LlamaForCausalLM``.
        config_reader: ``"module:function"``, from a transformers configuration to ``ModelConfig``,
            or to another ``ModelFacts`` that ``model`` understands.
        model: ``"module:Class"``, a ``BaseLLMModel`` built as ``Class(config, context)``.
        summary: one line for listings.
    """

    architectures: tuple[str, ...]
    config_reader: str
    model: str
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """An implementation of one entry of the op table (``minisgl.kernel.ops.OpTable``).

    Attributes:
        op: name of the entry, such as ``rms_norm``.
        name: of this implementation, such as ``flashinfer``.
        probe: the larger of the two ranks counts.
        load: returns the callable.
    """

    op: str
    name: str
    summary: str
    probe: Callable[[BackendQuery], Supported | Unsupported]
    load: Callable[[], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserRecord:
    """A parser of the tool calls that a model writes, on offer.

    Attributes:
        create: makes the parser of one answer; called in the API server for each answer.
        rank_for: gets the text of the model's chat template; above 0 if the template asks for this
            kind of calls, and ``auto`` takes the highest. It must be quick and must not raise.
        shows_special_tokens: whether the calls' marks are special tokens, which a text without
            special tokens does not show.
    """

    name: str
    summary: str
    create: "Callable[[ParserContext], TextParser]"
    rank_for: Callable[[str], int]
    shows_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParserRecord:
    """A parser that tells a model's reasoning from its answer, on offer.

    The other attributes are those of ``ToolParserRecord``.

    Attributes:
        tags: between which the parser reads reasoning, so that an answer of a given form may begin
            with some; ``None`` means that such an answer has no reasoning.
    """

    name: str
    summary: str
    create: "Callable[[ParserContext], TextParser]"
    rank_for: Callable[[str], int]
    shows_special_tokens: bool = False
    tags: ReasoningTags | None = None
