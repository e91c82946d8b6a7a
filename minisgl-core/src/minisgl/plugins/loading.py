"""Loads one plugin, stage by stage; every way to fail ends in a ``LoadError``.

The stages: one entry point, the version range, import, register, known hook names, records.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from minisgl.errors import nearest
from minisgl.plugins.discovery import CORE, Candidate, core_version
from minisgl.plugins.failure import LoadError, describe_error
from minisgl.plugins.hookspecs import HookSpecs
from minisgl.plugins.records import (
    AttentionBackendRecord,
    Capabilities,
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

RECORD_HOOKS: dict[str, type] = {
    "minisgl_attention_backends": AttentionBackendRecord,
    "minisgl_moe_backends": MoeBackendRecord,
    "minisgl_expert_exchanges": ExpertExchangeRecord,
    "minisgl_models": ModelRecord,
    "minisgl_ops": OpRecord,
    "minisgl_kv_pools": KVPoolRecord,
    "minisgl_prefix_caches": PrefixCacheRecord,
    "minisgl_grammar_backends": GrammarBackendRecord,
    "minisgl_tool_parsers": ToolParserRecord,
    "minisgl_reasoning_parsers": ReasoningParserRecord,
}
"""The hooks that are called at load time, and what each must return."""

HOOK_NAMES = tuple(name for name in vars(HookSpecs) if name.startswith("minisgl_"))

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_LAZY_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A registered plugin: its hooks by name, and the records that they returned."""

    candidate: Candidate
    hooks: dict[str, pluggy.HookImpl]
    records: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call one of this plugin's hooks with those arguments that it takes."""
        implementation = self.hooks[hook]
        return implementation.function(*(arguments[name] for name in implementation.argnames))


def load_plugin(manager: pluggy.PluginManager, candidate: Candidate) -> LoadedPlugin:
    """Load one plugin and register it with ``manager``.

    Raises:
        LoadError: at any stage; the plugin may be registered then.
    """
    path = _only_module(candidate)
    _check_version(candidate)
    module = _import(path)
    _register(manager, module, candidate)
    plugin = LoadedPlugin(candidate, _hooks(manager, module))
    for hook, record_type in RECORD_HOOKS.items():
        if hook in plugin.hooks:
            plugin.records[hook] = _collect(plugin, hook, record_type)
    return plugin


def _only_module(candidate: Candidate) -> str:
    if len(candidate.modules) > 1:
        raise LoadError(
            "entry point",
            f"it has {len(candidate.modules)} entry points in the group 'minisgl':"
            f" {', '.join(candidate.modules)}; one is allowed",
            "Its author must offer all hooks from one module.",
        )
    path = candidate.modules[0]
    if ":" in path:
        raise LoadError(
            "entry point",
            f"its entry point {path!r} names an object; it must name a module",
            f"Its author must write {path.partition(':')[0].strip()!r} and mark functions of that"
            " module with hookimpl.",
        )
    return path.partition("[")[0].strip()


def _check_version(candidate: Candidate) -> None:
    """Check that the installed core lies in every range that the plugin asks for."""
    for line in candidate.requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise LoadError(
                "version",
                f"its requirement {line!r} is malformed: {describe_error(error)}",
                f"Reinstall it: pip install --force-reinstall {candidate.distribution}",
            ) from error
        if canonicalize_name(requirement.name) != CORE:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(core_version(), prereleases=True):
            raise LoadError(
                "version",
                f"it needs {CORE}{requirement.specifier}, installed is {core_version()}",
                f"Install a matching pair: pip install -U {CORE} {candidate.distribution}",
            )


def _import(path: str) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        hint = f"Install what provides the module {error.name!r}."
        raise LoadError("import", describe_error(error), hint) from error
    except (Exception, SystemExit) as error:
        hint = f"Run: python -c 'import {path}'"
        raise LoadError("import", describe_error(error), hint) from error


def _register(manager: pluggy.PluginManager, module: ModuleType, candidate: Candidate) -> None:
    try:
        manager.register(module, name=candidate.distribution)
    except pluggy.PluginValidationError as error:
        hint = "Its author must take arguments by the names in minisgl.plugins.HookSpecs."
        raise LoadError("register", describe_error(error), hint) from error
    except Exception as error:
        hint = "Its module may be another plugin's, or an object in it breaks when looked at."
        raise LoadError("register", describe_error(error), hint) from error


def _hooks(manager: pluggy.PluginManager, module: ModuleType) -> dict[str, pluggy.HookImpl]:
    """Return the plugin's hooks by name; all must be known, plain and marked."""
    hooks = {
        caller.name: implementation
        for caller in manager.get_hookcallers(module) or ()
        for implementation in caller.get_hookimpls()
        if implementation.plugin is module
    }
    for name, implementation in hooks.items():
        if name not in HOOK_NAMES:
            raise LoadError(
                "hooks",
                f"unknown hook {name!r}.{nearest(name, HOOK_NAMES)}",
                f"Known hooks: {', '.join(HOOK_NAMES)}.",
            )
        if implementation.hookwrapper or implementation.wrapper:
            raise LoadError("hooks", f"{name} is a wrapper", "Wrappers of hooks are not called.")
    for name in HOOK_NAMES:
        if name not in hooks and inspect.isfunction(getattr(module, name, None)):
            raise LoadError(
                "hooks", f"{name} is not marked", "Its author must mark it with @hookimpl."
            )
    if not hooks:
        raise LoadError(
            "hooks",
            f"module {module.__name__!r} has no function marked with hookimpl",
            f"Known hooks: {', '.join(HOOK_NAMES)}.",
        )
    return hooks


def _collect(plugin: LoadedPlugin, hook: str, record_type: type) -> tuple[Any, ...]:
    """Call a hook and check what it returns, to the last record of a generator."""
    hint = f"Its author must return an iterable of {record_type.__name__}."
    try:
        returned = plugin.call(hook)
        if not isinstance(returned, Iterable):
            message = f"{hook} returned {returned!r}, which is no iterable"
            raise LoadError("records", message, hint)
        records = tuple(returned)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{hook} raised {type(error).__name__}: {error}"
        raise LoadError("records", message, "Its author must look at the traceback.") from error
    taken: set[tuple[str, ...]] = set()
    for record in records:
        if type(record) is not record_type:
            raise LoadError("records", f"{hook} returned {record!r}", hint)
        fault = record_fault(record)
        if fault:
            raise LoadError("records", f"{hook}: {fault}", "Its author must correct the record.")
        for key in _keys(record):
            if key in taken:
                raise LoadError("records", f"{hook} offers {':'.join(key)!r} twice", hint)
            taken.add(key)
    return records


def _keys(record: Any) -> list[tuple[str, ...]]:
    if isinstance(record, ModelRecord):
        return [(name,) for name in record.architectures]
    return [(record.op, record.name)] if isinstance(record, OpRecord) else [(record.name,)]


def record_fault(record: Any) -> str | None:
    """Return what is wrong with a record, or ``None``."""
    if isinstance(record, ModelRecord):
        return _model_fault(record)
    if not isinstance(record.name, str) or not _NAME.fullmatch(record.name):
        return f"name {record.name!r} must match {_NAME.pattern!r}"
    if record.name == "auto":
        return "name 'auto' is taken: it lets minisgl choose"
    if record.name == "none" and isinstance(record, GrammarBackendRecord):
        return "name 'none' is taken: it switches grammars off"
    if not isinstance(record.summary, str):
        return f"{record.name}: summary {record.summary!r} must be a string"
    return _settings_fault(record) or _callable_fault(record)


def _settings_fault(record: Any) -> str | None:
    if isinstance(record, OpRecord | ToolParserRecord | ReasoningParserRecord):
        return None
    settings = record.settings_type
    if not (isinstance(settings, type) and issubclass(settings, BaseModel)):
        return f"{record.name}: settings_type {settings!r} must be a pydantic model class"
    config = settings.model_config
    if config.get("extra") != "forbid" or not config.get("frozen"):
        return (
            f"{record.name}: {settings.__name__} must be declared with"
            " ConfigDict(frozen=True, extra='forbid')"
        )
    if not isinstance(getattr(record, "capabilities", Capabilities()), Capabilities):
        return f"{record.name}: capabilities {record.capabilities!r} must be Capabilities"
    return None


def _callable_fault(record: Any) -> str | None:
    for name in ("probe", "create", "load", "rank_for"):
        value: Callable[..., Any] | None = getattr(record, name, None)
        if hasattr(record, name) and not callable(value):
            return f"{record.name}: {name} {value!r} must be callable"
    return None


def _model_fault(record: ModelRecord) -> str | None:
    names = record.architectures
    if not isinstance(names, tuple) or not names or not all(isinstance(n, str) for n in names):
        return f"architectures {names!r} must be a tuple of names"
    for field_name in ("config_reader", "model"):
        path = getattr(record, field_name)
        if not isinstance(path, str) or not _LAZY_PATH.fullmatch(path):
            return f"{names[0]}: {field_name} {path!r} must be 'module:attribute'"
    return None
