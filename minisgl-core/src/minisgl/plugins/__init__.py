"""What plugin authors import: the hook marker, the records that hooks return, and their parts.

A plugin is a distribution with one entry point in the group ``minisgl``. It names a module of
functions marked with ``hookimpl``; that module imports neither torch nor a kernel package.
"""

from minisgl.plugins.hookspecs import HookSpecs, hookimpl, hookspec
from minisgl.plugins.rank_table import RankTable
from minisgl.plugins.records import (
    AttentionBackendRecord,
    BackendQuery,
    Capabilities,
    ExpertExchangeRecord,
    GrammarBackendRecord,
    KVPoolRecord,
    ModelRecord,
    MoeBackendRecord,
    NoSettings,
    OpRecord,
    PrefixCacheRecord,
    ReasoningParserRecord,
    Supported,
    ToolParserRecord,
    Unsupported,
)
from minisgl.request import RequestStats, StepStats

__all__ = [
    "AttentionBackendRecord",
    "BackendQuery",
    "Capabilities",
    "ExpertExchangeRecord",
    "GrammarBackendRecord",
    "HookSpecs",
    "KVPoolRecord",
    "ModelRecord",
    "MoeBackendRecord",
    "NoSettings",
    "OpRecord",
    "PrefixCacheRecord",
    "RankTable",
    "ReasoningParserRecord",
    "RequestStats",
    "StepStats",
    "Supported",
    "ToolParserRecord",
    "Unsupported",
    "hookimpl",
    "hookspec",
]
