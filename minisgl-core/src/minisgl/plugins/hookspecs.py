"""Every hook. Hooks run at start-up (observers after steps); hot loops call plain objects.

All hooks of a process run in distribution order. Implementations of the collecting hooks return
typed, frozen records; what they return is checked, and a plugin that returns anything else is
left out with a ``PluginFailure``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from minisgl.plugins.records import (
    AttentionBackendRecord,
    ExpertExchangeRecord,
    GrammarBackendRecord,
    KVPoolRecord,
    ModelRecord,
    MoeBackendRecord,
    OpRecord,
    PrefixCacheRecord,
    ReasoningParserRecord,
    ToolParserRecord,
)
from minisgl.request import RequestStats, StepStats

if TYPE_CHECKING:
    from fastapi import FastAPI

hookspec = pluggy.HookspecMarker("minisgl")
hookimpl = pluggy.HookimplMarker("minisgl")


class HookSpecs:
    """The signatures; a plugin implements any of them as module-level functions."""

    @hookspec
    def minisgl_attention_backends(self) -> Iterable[AttentionBackendRecord[Any]]:
        """Offer attention backends. Once per process, before a device is touched; may raise."""
        return ()

    @hookspec
    def minisgl_moe_backends(self) -> Iterable[MoeBackendRecord[Any]]:
        """Offer MoE backends. Once per process, before a device is touched; may raise."""
        return ()

    @hookspec
    def minisgl_expert_exchanges(self) -> Iterable[ExpertExchangeRecord[Any]]:
        """Offer exchanges between ranks with different experts. Once per process; may raise."""
        return ()

    @hookspec
    def minisgl_models(self) -> Iterable[ModelRecord]:
        """Offer model architectures. Once per process; may raise."""
        return ()

    @hookspec
    def minisgl_ops(self) -> Iterable[OpRecord]:
        """Offer implementations of op-table entries. Once per process; may raise."""
        return ()

    @hookspec
    def minisgl_kv_pools(self) -> Iterable[KVPoolRecord[Any]]:
        """Offer KV pools. Once per process; may raise."""
        return ()

    @hookspec
    def minisgl_prefix_caches(self) -> Iterable[PrefixCacheRecord[Any]]:
        """Offer prefix caches. Once per process; may raise."""
        return ()

    @hookspec
    def minisgl_grammar_backends(self) -> Iterable[GrammarBackendRecord[Any]]:
        """Offer grammar engines. Once per process; may raise."""
        return ()

    @hookspec
    def minisgl_tool_parsers(self) -> Iterable[ToolParserRecord]:
        """Offer parsers of tool calls. Once per process; may raise."""
        return ()

    @hookspec
    def minisgl_reasoning_parsers(self) -> Iterable[ReasoningParserRecord]:
        """Offer parsers of reasoning. Once per process; may raise."""
        return ()

    @hookspec(firstresult=True)
    def minisgl_resolve_checkpoint(
        self,
        reference: str,  # noqa: ARG002
        cache_dir: Path | None,  # noqa: ARG002
    ) -> Path | None:
        """Turn a model reference into a local path, or return ``None`` if it is not yours.

        Called once at start-up, in the main process. Claim references by their scheme
        (``modelscope:``); core's own resolver comes last. May download and may raise
        ``ModelLoadError``, which ends the start.
        """
        return None

    @hookspec
    def minisgl_step_finished(self, stats: StepStats) -> None:
        """Observe a finished step, on rank 0. An exception is logged once and goes no further."""

    @hookspec
    def minisgl_request_finished(self, stats: RequestStats) -> None:
        """Observe a finished request, on rank 0. An exception is logged once, no more."""

    @hookspec
    def minisgl_routes(self, app: "FastAPI", client: Any) -> None:
        """Add HTTP routes. Only for plugins that ``plugins.routes`` names; in the API process."""
