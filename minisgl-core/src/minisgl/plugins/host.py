"""The plugin host: loads every plugin, remembers the ones that failed, answers for the rest."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pluggy
from packaging.utils import canonicalize_name

from minisgl.errors import (
    MinisglError,
    ModelLoadError,
    PluginError,
    UnknownBackendError,
    nearest,
)
from minisgl.plugins.discovery import CORE, Candidate, find_candidates
from minisgl.plugins.failure import LoadError, PluginFailure, describe_error
from minisgl.plugins.hookspecs import HookSpecs
from minisgl.plugins.loading import RECORD_HOOKS, LoadedPlugin, load_plugin
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
from minisgl.plugins.registry import Offer, Registry
from minisgl.request import RequestStats, StepStats

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

Fingerprint = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One installed plugin, for listings.

    Attributes:
        distribution, version: whose plugin.
        status: ``active``, ``failed`` or ``disabled``.
        offers: what it registers, by hook: names of records, or nothing for other hooks.
    """

    distribution: str
    version: str
    status: Literal["active", "failed", "disabled"]
    offers: dict[str, tuple[str, ...]]


class PluginHost:
    """The loaded plugins. Built by ``load_plugins``; read-only, but for the observers' counters.

    Attributes:
        plugins: every installed plugin in distribution order.
        failures: those that could not be loaded.
        attention, moe, exchanges, ops, kv_pools, prefix_caches, models, grammars, tool_parsers,
            reasoning_parsers: what the others offer. Models are registered by architecture, ops
            as ``OP.NAME``.
        observer_errors: exceptions of observers, counted by (distribution, hook).
    """

    def __init__(
        self,
        loaded: Sequence[LoadedPlugin],
        failures: Sequence[PluginFailure] = (),
        disabled: Sequence[Candidate] = (),
    ) -> None:
        self._loaded = {plugin.candidate.distribution: plugin for plugin in loaded}
        self.failures = tuple(failures)
        self.plugins = _listing(loaded, failures, disabled)
        left_out = _left_out(failures, disabled)
        self.attention: Registry[AttentionBackendRecord[Any]] = Registry(
            "attention.backend", self._offers("minisgl_attention_backends"), left_out
        )
        self.moe: Registry[MoeBackendRecord[Any]] = Registry(
            "moe.backend", self._offers("minisgl_moe_backends"), left_out
        )
        self.exchanges: Registry[ExpertExchangeRecord[Any]] = Registry(
            "moe.exchange", self._offers("minisgl_expert_exchanges"), left_out
        )
        self.ops: Registry[OpRecord] = Registry("op", self._offers("minisgl_ops"), left_out)
        self.kv_pools: Registry[KVPoolRecord[Any]] = Registry(
            "cache.pool", self._offers("minisgl_kv_pools"), left_out
        )
        self.prefix_caches: Registry[PrefixCacheRecord[Any]] = Registry(
            "cache.prefix", self._offers("minisgl_prefix_caches"), left_out
        )
        self.models: Registry[ModelRecord] = Registry(
            "architecture", self._offers("minisgl_models"), left_out, qualifiable=False
        )
        self.grammars: Registry[GrammarBackendRecord[Any]] = Registry(
            "structured.backend", self._offers("minisgl_grammar_backends"), left_out
        )
        self.tool_parsers: Registry[ToolParserRecord] = Registry(
            "server.tool_call_parser", self._offers("minisgl_tool_parsers"), left_out
        )
        self.reasoning_parsers: Registry[ReasoningParserRecord] = Registry(
            "server.reasoning_parser", self._offers("minisgl_reasoning_parsers"), left_out
        )
        self.observer_errors: Counter[tuple[str, str]] = Counter()
        self._step_observers = self._with_hook("minisgl_step_finished")
        self._request_observers = self._with_hook("minisgl_request_finished")

    @property
    def registries(self) -> dict[str, Registry[Any]]:
        """Every registry by its attribute's name, for listings."""
        return {
            "attention": self.attention,
            "moe": self.moe,
            "exchanges": self.exchanges,
            "ops": self.ops,
            "kv_pools": self.kv_pools,
            "prefix_caches": self.prefix_caches,
            "models": self.models,
            "grammars": self.grammars,
            "tool_parsers": self.tool_parsers,
            "reasoning_parsers": self.reasoning_parsers,
        }

    def model_for(self, architectures: Sequence[str]) -> ModelRecord:
        """Return the record of the first architecture that a plugin offers.

        Raises:
            UnknownBackendError: no plugin offers any of them.
            AmbiguousBackendError: two plugins offer it; one must be disabled.
        """
        for architecture in architectures:
            if self.models.named(architecture):
                return self.models.get(architecture).record
        try:
            return self.models.get(architectures[0] if architectures else "").record
        except UnknownBackendError as error:
            raise UnknownBackendError(f"{error} Try: pip install -U minisgl-models") from None

    def resolve_checkpoint(self, reference: str, cache_dir: Path | None) -> Path:
        """Return the local path of a model reference, from the first plugin that knows it.

        Raises:
            ModelLoadError: no plugin knows it, or its download fails.
            PluginError: a plugin's hook breaks.
        """
        hook = "minisgl_resolve_checkpoint"
        resolvers = self._with_hook(hook)
        for plugin in sorted(resolvers, key=lambda plugin: plugin.hooks[hook].trylast):
            try:
                path = plugin.call(hook, reference=reference, cache_dir=cache_dir)
            except MinisglError:
                raise
            except Exception as error:
                raise PluginError(
                    f"{_owner(plugin)} failed to resolve {reference!r}: {describe_error(error)}."
                ) from error
            if isinstance(path, Path):
                return path
            if path is not None:
                raise PluginError(f"{_owner(plugin)}: {hook} returned {path!r}, not a Path.")
        raise ModelLoadError(
            f"model.path={reference!r} is nothing that an installed plugin can resolve: neither a"
            " local folder, nor a .gguf file, nor a hub id, nor package:NAME."
        )

    @property
    def has_step_observers(self) -> bool:
        """Whether anybody listens: if not, no ``StepStats`` need be made."""
        return bool(self._step_observers)

    @property
    def has_request_observers(self) -> bool:
        """Whether any plugin implements ``minisgl_request_finished``."""
        return bool(self._request_observers)

    def step_finished(self, stats: StepStats) -> None:
        """Tell every step observer; their exceptions are logged once and counted."""
        self._observe(self._step_observers, "minisgl_step_finished", stats)

    def request_finished(self, stats: RequestStats) -> None:
        """Tell every request observer; their exceptions are logged once and counted."""
        self._observe(self._request_observers, "minisgl_request_finished", stats)

    def mount_routes(self, names: Iterable[str], app: "FastAPI", client: Any) -> None:
        """Let the plugins that ``plugins.routes`` names add their HTTP routes.

        Raises:
            PluginError: a name is not that of a plugin with routes, or its hook breaks.
        """
        offering = {
            plugin.candidate.distribution: plugin for plugin in self._with_hook("minisgl_routes")
        }
        for name in names:
            plugin = offering.get(canonicalize_name(name))
            if plugin is None:
                known = ", ".join(offering) or "none"
                raise PluginError(
                    f"plugins.routes names {name!r}, which has no routes."
                    f" With routes: {known}.{nearest(name, offering)}"
                )
            try:
                plugin.call("minisgl_routes", app=app, client=client)
            except Exception as error:
                raise PluginError(
                    f"{_owner(plugin)} failed to add its routes: {describe_error(error)}."
                ) from error

    def fingerprint(self) -> Fingerprint:
        """Return (distribution, version) of every active plugin, in order."""
        return tuple(
            (info.distribution, info.version) for info in self.plugins if info.status == "active"
        )

    def check_fingerprint(self, expected: Fingerprint) -> None:
        """Refuse to work beside a process that has other plugins.

        Raises:
            PluginError: names each plugin that differs.
        """
        here, there = dict(self.fingerprint()), dict(expected)
        differences = [
            f"{name} (here {here.get(name, 'missing')}, there {there.get(name, 'missing')})"
            for name in sorted(here.keys() | there.keys())
            if here.get(name) != there.get(name)
        ]
        if differences:
            raise PluginError(
                "this process has other plugins than the one that started it:"
                f" {', '.join(differences)}. Install the same versions for both."
            )

    def _offers(self, hook: str) -> list[Offer[Any]]:
        return [
            Offer(name, record, plugin.candidate.distribution, plugin.candidate.version)
            for plugin in self._loaded.values()
            for record in plugin.records.get(hook, ())
            for name in _names(record)
        ]

    def _with_hook(self, hook: str) -> tuple[LoadedPlugin, ...]:
        return tuple(plugin for plugin in self._loaded.values() if hook in plugin.hooks)

    def _observe(self, observers: Sequence[LoadedPlugin], hook: str, stats: object) -> None:
        for plugin in observers:
            try:
                plugin.call(hook, stats=stats)
            except Exception as error:
                key = (plugin.candidate.distribution, hook)
                self.observer_errors[key] += 1
                if self.observer_errors[key] == 1:
                    logger.warning(
                        "%s: %s raised %s; this is logged once",
                        _owner(plugin),
                        hook,
                        describe_error(error),
                    )
                    logger.debug("traceback of %s", _owner(plugin), exc_info=error)


def load_plugins(disabled: Collection[str] = (), strict: bool = False) -> PluginHost:
    """Load every installed plugin, in distribution order.

    A plugin that fails is left out, remembered in ``PluginHost.failures`` and logged as one
    WARNING.

    Args:
        disabled: distributions whose plugins are not even imported.
        strict: make any failure fatal.

    Raises:
        PluginError: core's own part fails or is disabled; in strict mode, any failure.
    """
    candidates = find_candidates()
    blocked = _check_disabled(disabled, candidates)
    manager = pluggy.PluginManager("minisgl")
    manager.add_hookspecs(HookSpecs)
    loaded: list[LoadedPlugin] = []
    failures: list[PluginFailure] = []
    for candidate in candidates:
        if candidate.distribution in blocked:
            continue
        try:
            loaded.append(load_plugin(manager, candidate))
        except LoadError as error:
            if manager.has_plugin(candidate.distribution):
                manager.unregister(name=candidate.distribution)
            failures.append(_remember(candidate, error))
    if failures and (strict or any(failure.distribution == CORE for failure in failures)):
        causes = "".join(f"\n  {failure}. {failure.hint}" for failure in failures)
        raise PluginError(f"{len(failures)} plugin(s) failed to load:{causes}")
    return PluginHost(loaded, failures, [c for c in candidates if c.distribution in blocked])


def _check_disabled(disabled: Collection[str], candidates: Sequence[Candidate]) -> set[str]:
    """Return the normalised names; a name that is not installed is a likely typo."""
    installed = {candidate.distribution for candidate in candidates}
    blocked: set[str] = set()
    for given in disabled:
        name = canonicalize_name(given)
        if name == CORE:
            raise PluginError(f"plugins.disabled names {given!r}, which cannot be disabled.")
        if name not in installed:
            logger.warning(
                "plugins.disabled names %r, which is not installed.%s",
                given,
                nearest(name, installed),
            )
        blocked.add(name)
    return blocked


def _remember(candidate: Candidate, error: LoadError) -> PluginFailure:
    failure = PluginFailure(
        candidate.distribution, candidate.version, error.stage, error.error, error.hint
    )
    logger.warning(
        "plugin %s %s ignored, stage '%s' failed: %s. See: minisgl plugins show %s",
        failure.distribution,
        failure.version,
        failure.stage,
        failure.error.rstrip("."),
        failure.distribution,
    )
    logger.debug("traceback of plugin %s", failure.distribution, exc_info=error)
    return failure


def _names(record: Any) -> tuple[str, ...]:
    if isinstance(record, ModelRecord):
        return record.architectures
    return (f"{record.op}.{record.name}",) if isinstance(record, OpRecord) else (record.name,)


def _listing(
    loaded: Sequence[LoadedPlugin],
    failures: Sequence[PluginFailure],
    disabled: Sequence[Candidate],
) -> tuple[PluginInfo, ...]:
    infos = [
        PluginInfo(
            plugin.candidate.distribution,
            plugin.candidate.version,
            "active",
            {
                hook: tuple(n for record in plugin.records.get(hook, ()) for n in _names(record))
                for hook in sorted(plugin.hooks, key=_hook_order)
            },
        )
        for plugin in loaded
    ]
    infos += [PluginInfo(f.distribution, f.version, "failed", {}) for f in failures]
    infos += [PluginInfo(c.distribution, c.version, "disabled", {}) for c in disabled]
    return tuple(sorted(infos, key=lambda info: info.distribution))


def _hook_order(hook: str) -> tuple[bool, int, str]:
    """Sort the hooks with records first, in the order of the specification."""
    known = list(RECORD_HOOKS)
    return (hook not in RECORD_HOOKS, known.index(hook) if hook in known else 0, hook)


def _left_out(failures: Sequence[PluginFailure], disabled: Sequence[Candidate]) -> list[str]:
    causes = []
    if failures:
        causes.append(f"Failed to load: {', '.join(map(str, failures))}")
    if disabled:
        causes.append(f"Disabled: {', '.join(c.distribution for c in disabled)}")
    return causes


def _owner(plugin: LoadedPlugin) -> str:
    return f"plugin {plugin.candidate.distribution} {plugin.candidate.version}"
