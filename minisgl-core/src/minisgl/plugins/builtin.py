"""Core's own reference backends, offered through the same hooks as anyone's."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from minisgl.parsing import families
from minisgl.parsing.tools_json import HermesCalls, Llama3Calls, MistralCalls
from minisgl.parsing.tools_pythonic import PythonicCalls
from minisgl.parsing.tools_xml import Qwen3CoderCalls
from minisgl.plugins import experts
from minisgl.plugins.hookspecs import hookimpl
from minisgl.plugins.measured_ranks import RANKS
from minisgl.plugins.records import (
    AttentionBackendRecord,
    BackendQuery,
    Capabilities,
    ExpertExchangeRecord,
    GrammarBackendRecord,
    KVPoolRecord,
    MoeBackendRecord,
    NoSettings,
    OpRecord,
    PrefixCacheRecord,
    ReasoningParserRecord,
    Supported,
    ToolParserRecord,
    Unsupported,
)

if TYPE_CHECKING:
    from minisgl.attention.interface import AttentionBackend, AttentionContext
    from minisgl.kvcache.interface import KVCachePool, KVPoolSpec, PrefixCache
    from minisgl.structured.interface import GrammarBackend, GrammarContext


def _reference(query: BackendQuery) -> Supported | Unsupported:  # noqa: ARG001
    """The reference runs everywhere; anything faster has a higher rank."""
    return Supported(prefill_rank=0, decode_rank=0)


def _probe_onednn(query: BackendQuery) -> Supported | Unsupported:
    if query.device != "cpu":
        return Unsupported(f"needs a CPU, the device is {query.device}")
    if query.dtype != "float32":
        return Unsupported(f"needs float32, the model runs in {query.dtype}")
    from minisgl.kernel import onednn

    reason = onednn.missing()
    return Supported(prefill_rank=10, decode_rank=10) if reason is None else Unsupported(reason)


def _load_onednn_linear() -> Callable[..., Any]:
    from minisgl.kernel import onednn

    return onednn.linear


_MOST_TRITON_HEAD_DIM = 256

_TRITON_PRODUCTS = {
    "linear": "Matrix products of up to 128 rows; cuBLAS for the others",
    "linear_parts": "The same in parts, where one has too few tiles",
    "add_norm_linear": "Residual sum, norm and product, in one kernel for one row",
    "add_norm_gated": "The same with the gated activation",
}

_TRITON_OPS = {
    "rms_norm": "RMSNorm, a row at a time",
    "add_rms_norm": "Residual sum and RMSNorm in one pass, in place",
    "silu_and_mul": "SwiGLU in one pass",
    "gelu_and_mul": "GeGLU in one pass",
    "rope": "q/k norms and rotation in one kernel",
    "store_kv": "K and V to their slots in one kernel",
    "rope_store": "q/k norms, rotation and the store of K and V in one kernel",
    "page_indices": "Index lists of paged kernels in one launch",
    "apply_plan": "A packed plan into the rows' state, read on the device",
    "advance_rows": "Every decode row's state into the model's inputs",
    "sample_gumbel": "Greedy and Gumbel-max sampling straight from the logits",
    "sample_filtered": "The same behind top-k, top-p and min-p, without sorting",
    "penalize": "Repetition, frequency and presence penalty in one pass",
    "mask_tokens": "Masks from the host, read bit by bit",
}


def _probe_triton(query: BackendQuery) -> Supported | Unsupported:
    if query.device != "cuda":
        return Unsupported(f"needs a CUDA device, the device is {query.device}")
    found = query.compute_capability
    if found is None or found < (8, 0):
        version = "none" if found is None else f"{found[0]}.{found[1]}"
        return Unsupported(f"needs compute capability 8.0, found {version}")
    if query.dtype not in ("float32", "bfloat16", "float16"):
        return Unsupported(f"needs float32, bfloat16 or float16, the model runs in {query.dtype}")
    if find_spec("triton") is None:
        return Unsupported("needs the package triton, which is not installed")
    return Supported(prefill_rank=10, decode_rank=10)


def _probe_triton_linear(query: BackendQuery) -> Supported | Unsupported:
    answer = _probe_triton(query)
    if isinstance(answer, Supported) and query.dtype == "float32":
        return Unsupported("needs a 16-bit dtype, the model runs in float32")
    return answer


def _load_triton(op: str) -> Callable[..., Any]:
    from minisgl.kernel import triton

    function: Callable[..., Any] = getattr(triton, op)
    return function


def _create_attention(context: "AttentionContext", settings: NoSettings) -> "AttentionBackend":  # noqa: ARG001
    from minisgl.attention.torch_backend import TorchAttentionBackend

    return TorchAttentionBackend(context)


def _create_mha_pool(spec: "KVPoolSpec", settings: NoSettings) -> "KVCachePool":  # noqa: ARG001
    from minisgl.kvcache.mha_pool import MHAKVCachePool

    return MHAKVCachePool(spec)


def _create_radix(page_size: int, settings: NoSettings) -> "PrefixCache":  # noqa: ARG001
    from minisgl.kvcache.radix_cache import RadixPrefixCache

    return RadixPrefixCache(page_size)


def _create_naive(page_size: int, settings: NoSettings) -> "PrefixCache":  # noqa: ARG001
    from minisgl.kvcache.naive_cache import NaivePrefixCache

    return NaivePrefixCache(page_size)


class XGrammarSettings(BaseModel):
    """Settings of the backend ``xgrammar``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_whitespace: int | None = Field(
        8,
        ge=1,
        le=64,
        description="Most spaces and line breaks in a row between the parts of JSON: a model that"
        " goes astray writes nothing else until max_tokens; null sets no limit.",
    )


def _probe_xgrammar() -> int | Unsupported:
    if find_spec("xgrammar") is None:
        return Unsupported(
            "needs the package xgrammar, which is not installed: pip install"
            " 'minisgl-core[structured]'"
        )
    return 10


def _create_xgrammar(context: "GrammarContext", settings: XGrammarSettings) -> "GrammarBackend":
    from minisgl.structured.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(context, settings.max_whitespace)


def _probe_triton_attention(query: BackendQuery) -> Supported | Unsupported:
    answer = _probe_triton(query)
    if isinstance(answer, Supported) and query.head_dim > _MOST_TRITON_HEAD_DIM:
        most = _MOST_TRITON_HEAD_DIM
        return Unsupported(f"needs head dims of up to {most}, the model has {query.head_dim}")
    if not isinstance(answer, Supported):
        return answer
    ranks, shape = RANKS["triton"], (query.page_size, query.num_q_heads, query.num_kv_heads)
    return Supported(
        prefill_rank=ranks.prefill_rank(*shape),
        decode_rank=ranks.decode_rank(*shape),
        source=ranks.source,
    )


def _create_triton_attention(
    context: "AttentionContext",
    settings: NoSettings,  # noqa: ARG001
) -> "AttentionBackend":
    from minisgl.attention.triton_backend import TritonAttentionBackend

    return TritonAttentionBackend(context)


@hookimpl
def minisgl_attention_backends() -> Iterable[AttentionBackendRecord[Any]]:
    """Offer Triton kernels for GPUs, and the torch reference for all else."""
    return [
        AttentionBackendRecord(
            name="triton",
            summary="Triton kernels for any NVIDIA GPU, without another package",
            settings_type=NoSettings,
            probe=_probe_triton_attention,
            create=_create_triton_attention,
            capabilities=Capabilities(
                devices=("cuda",),
                cuda_graphs=True,
                mixed_batches=True,
                sliding_window=True,
                logit_soft_cap=True,
            ),
        ),
        AttentionBackendRecord(
            name="torch",
            summary="Reference in plain torch, for any device",
            settings_type=NoSettings,
            probe=_reference,
            create=_create_attention,
            capabilities=Capabilities(mixed_batches=True, sliding_window=True, logit_soft_cap=True),
        ),
    ]


@hookimpl
def minisgl_moe_backends() -> Iterable[MoeBackendRecord[Any]]:
    """Offer the torch reference: a loop over experts."""
    return experts.BACKENDS


@hookimpl
def minisgl_expert_exchanges() -> Iterable[ExpertExchangeRecord[Any]]:
    """Offer exchanges out of a communicator's collectives."""
    return experts.EXCHANGES


@hookimpl
def minisgl_ops() -> Iterable[OpRecord]:
    """Offer what beats a torch reference without any other package."""
    return [
        OpRecord(
            op="linear",
            name="onednn",
            summary="Matrix products of 2 to 32 rows on a CPU, through torch's own oneDNN",
            probe=_probe_onednn,
            load=_load_onednn_linear,
        ),
        *(
            OpRecord(
                op=op,
                name="triton",
                summary=summary,
                probe=_probe_triton_linear if op in _TRITON_PRODUCTS else _probe_triton,
                load=partial(_load_triton, op),
            )
            for op, summary in (_TRITON_PRODUCTS | _TRITON_OPS).items()
        ),
    ]


@hookimpl
def minisgl_kv_pools() -> Iterable[KVPoolRecord[Any]]:
    """Offer the pool of multi-head attention: K and V of every layer in NHD pages."""
    return [
        KVPoolRecord(
            name="mha",
            summary="K and V of every layer in NHD pages",
            settings_type=NoSettings,
            probe=_reference,
            create=_create_mha_pool,
            capabilities=Capabilities(
                kv_dtypes=("float32", "bfloat16", "float16"),
                sliding_window=True,
                logit_soft_cap=True,
            ),
        )
    ]


@hookimpl
def minisgl_prefix_caches() -> Iterable[PrefixCacheRecord[Any]]:
    """Offer the radix tree, and the cache that shares nothing."""
    return [
        PrefixCacheRecord(
            name="radix",
            summary="Radix tree: requests share the pages of equal prefixes",
            settings_type=NoSettings,
            create=_create_radix,
        ),
        PrefixCacheRecord(
            name="naive",
            summary="Shares nothing",
            settings_type=NoSettings,
            create=_create_naive,
        ),
    ]


@hookimpl
def minisgl_grammar_backends() -> Iterable[GrammarBackendRecord[Any]]:
    """Offer XGrammar, which the extra ``structured`` installs."""
    return [
        GrammarBackendRecord(
            name="xgrammar",
            summary="JSON schemas, regular expressions, choices and EBNF through XGrammar",
            settings_type=XGrammarSettings,
            probe=_probe_xgrammar,
            create=_create_xgrammar,
        )
    ]


@hookimpl
def minisgl_tool_parsers() -> Iterable[ToolParserRecord]:
    """Offer the parsers of the common families of models."""
    return [
        ToolParserRecord(
            name="hermes",
            summary="<tool_call> with JSON: Hermes, Qwen 2.5 and 3",
            create=HermesCalls,
            rank_for=families.hermes_rank,
        ),
        ToolParserRecord(
            name="llama3_json",
            summary="JSON with name and parameters: Llama 3",
            create=Llama3Calls,
            rank_for=families.llama3_json_rank,
            shows_special_tokens=True,
        ),
        ToolParserRecord(
            name="mistral",
            summary="[TOOL_CALLS] with JSON: Mistral",
            create=MistralCalls,
            rank_for=families.mistral_rank,
            shows_special_tokens=True,
        ),
        ToolParserRecord(
            name="pythonic",
            summary="A list of calls as in Python: Llama 3.2 and 4",
            create=PythonicCalls,
            rank_for=families.pythonic_rank,
            shows_special_tokens=True,
        ),
        ToolParserRecord(
            name="qwen3_coder",
            summary="Tags for function and parameters: Qwen3-Coder",
            create=Qwen3CoderCalls,
            rank_for=families.qwen3_coder_rank,
        ),
    ]


@hookimpl
def minisgl_reasoning_parsers() -> Iterable[ReasoningParserRecord]:
    """Offer the parsers of reasoning between tags."""
    return [
        ReasoningParserRecord(
            name="qwen3",
            summary="<think>...</think>, opened by the answer or the prompt",
            create=families.think,
            tags=families.THINK,
            rank_for=families.qwen3_rank,
        ),
        ReasoningParserRecord(
            name="deepseek_r1",
            summary="...</think>: the answer begins with reasoning, tag or not",
            create=families.implied_think,
            tags=families.IMPLIED_THINK,
            rank_for=families.never,
        ),
        ReasoningParserRecord(
            name="mistral",
            summary="[THINK]...[/THINK]",
            create=families.mistral_think,
            tags=families.MISTRAL_THINK,
            rank_for=families.mistral_reasoning_rank,
            shows_special_tokens=True,
        ),
    ]


@hookimpl(trylast=True)
def minisgl_resolve_checkpoint(reference: str, cache_dir: Path | None) -> Path | None:
    """Resolve local folders, ``.gguf`` files, ``package:NAME`` and hub ids."""
    from minisgl.models.resolve import resolve_checkpoint

    return resolve_checkpoint(reference, cache_dir)
