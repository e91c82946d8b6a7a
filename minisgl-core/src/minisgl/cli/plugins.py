"""``minisgl plugins list | show | check | explain``. Nothing here needs a GPU."""

import argparse
import json
from dataclasses import asdict, fields
from typing import Any

from pydantic import BaseModel

from minisgl.cli.flags import add_settings_arguments
from minisgl.errors import PluginError, SettingsError, nearest
from minisgl.plugins.host import PluginHost, PluginInfo, load_plugins
from minisgl.settings import ResolvedSettings

_COMMON = ("plugins.disabled", "log.level")
_QUERY = (
    *(
        "model.path",
        "model.implementation",
        "model.dtype",
        "model.load_format",
        "model.cache_dir",
        "engine.device",
    ),
    *("attention.backend", "attention.measurements", "cache.page_size", "cache.pool"),
    *("scheduler.max_running_requests", "parallel.tensor_parallel_size"),
    *("parallel.expert_parallel_size", "moe.backend", "moe.exchange", "moe.weights_dtype"),
)
_KINDS = ("model", "attention", "moe", "ops")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the four actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|check|explain")
    texts = {
        "list": "what is installed, what it offers, and what failed",
        "show": "all about one plugin: records, settings, capabilities, failure",
        "check": "exit with 3 if any plugin failed to load",
        "explain": "each candidate's rank, or the reason against it",
    }
    for action, text in texts.items():
        command = actions.add_parser(
            action, help=text, description=f"{text.capitalize()}.", allow_abbrev=False
        )
        command.add_argument("--json", action="store_true", help="as JSON")
        if action == "show":
            command.add_argument("name", metavar="NAME", help="distribution, or name of a backend")
        if action == "explain":
            command.add_argument("kind", choices=_KINDS, help="what to choose a backend for")
            command.add_argument(
                "--compute-capability",
                metavar="X.Y",
                help="of a GPU that need not be here; by default, of the one that is",
            )
        add_settings_arguments(
            command, only=(*_COMMON, *_QUERY) if action == "explain" else _COMMON
        )


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Print what was asked for; ``check`` returns 3 if a plugin failed."""
    host = load_plugins(disabled=resolved.settings.plugins.disabled)
    if args.action == "explain":
        from minisgl.cli.explain import explain

        return explain(args, resolved.settings, host)
    if args.action == "show":
        described = [_describe(host, info) for info in _find(host, args.name)]
        print(_json(described) if args.json else "\n\n".join(map(_show, described)))
        return 0
    if args.action == "check":
        return _check(host, as_json=args.json)
    _list(host, as_json=args.json)
    return 0


def _list(host: PluginHost, *, as_json: bool) -> None:
    if as_json:
        print(_json({"plugins": [_summary(host, i) for i in host.plugins], **_ambiguous(host)}))
        return
    rows = [("distribution", "version", "status", "offers")]
    rows += [(i.distribution, i.version, i.status, _offers_text(i)) for i in host.plugins]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[3]]).rstrip())
    _print_problems(host)


def _check(host: PluginHost, *, as_json: bool) -> int:
    if as_json:
        failures = [asdict(failure) for failure in host.failures]
        print(_json({"ok": not failures, "failures": failures, **_ambiguous(host)}))
    else:
        active = sum(info.status == "active" for info in host.plugins)
        print(f"{active} active, {len(host.failures)} failed")
        _print_problems(host)
    return PluginError.exit_code if host.failures else 0


def _print_problems(host: PluginHost) -> None:
    for failure in host.failures:
        print(f"failed: {failure}. {failure.hint}")
    for setting, names in _ambiguous(host)["ambiguous"].items():
        for name, ways in names.items():
            print(f"ambiguous: {setting}={name!r}; write {' or '.join(ways)}")


def _ambiguous(host: PluginHost) -> dict[str, dict[str, dict[str, list[str]]]]:
    return {
        "ambiguous": {
            registry.setting: {
                name: [offer.qualified for offer in offers]
                for name, offers in registry.ambiguous.items()
            }
            for registry in host.registries.values()
            if registry.ambiguous
        }
    }


def _summary(host: PluginHost, info: PluginInfo) -> dict[str, Any]:
    failures = {failure.distribution: asdict(failure) for failure in host.failures}
    return {**asdict(info), "failure": failures.get(info.distribution)}


def _offers_text(info: PluginInfo) -> str:
    parts = []
    for hook, names in info.offers.items():
        kind = hook.removeprefix("minisgl_")
        parts.append(f"{kind}: {', '.join(names)}" if names else kind)
    return "; ".join(parts)


def _find(host: PluginHost, name: str) -> list[PluginInfo]:
    """Return the plugin of that distribution, or every plugin that offers a backend so named."""
    from packaging.utils import canonicalize_name

    by_distribution = {info.distribution: info for info in host.plugins}
    if canonicalize_name(name) in by_distribution:
        return [by_distribution[canonicalize_name(name)]]
    offering = [i for i in host.plugins if any(name in names for names in i.offers.values())]
    if not offering:
        offered = [offer.name for registry in host.registries.values() for offer in registry]
        raise SettingsError(
            f"No installed plugin is called or offers {name!r}."
            f" Installed: {', '.join(by_distribution)}."
            f"{nearest(name, [*by_distribution, *offered])}"
        )
    return offering


def _describe(host: PluginHost, info: PluginInfo) -> dict[str, Any]:
    """Return everything about one plugin as plain data."""
    records = {
        kind: [
            {"name": offer.name, **_record(offer.record)}
            for offer in registry
            if offer.distribution == info.distribution
        ]
        for kind, registry in host.registries.items()
    }
    present = {kind: found for kind, found in records.items() if found}
    return {**_summary(host, info), "records": present}


def _record(record: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": record.summary}
    settings: type[BaseModel] | None = getattr(record, "settings_type", None)
    if settings is not None:
        described["settings"] = {
            name: {"default": field.get_default(call_default_factory=True, validated_data={}),
                   "description": field.description}
            for name, field in settings.model_fields.items()
        }  # fmt: skip
    capabilities = getattr(record, "capabilities", None)
    if capabilities is not None:
        described["capabilities"] = {
            field.name: getattr(capabilities, field.name) for field in fields(capabilities)
        }
    return described


def _show(described: dict[str, Any]) -> str:
    """Write one plugin as text."""
    lines = [f"{described['distribution']} {described['version']}: {described['status']}"]
    failure = described["failure"]
    if failure:
        lines += [f"  {key}: {failure[key]}" for key in ("stage", "error", "hint")]
    for kind, records in described["records"].items():
        lines.append(f"  {kind}")
        for record in records:
            lines.append(f"    {record['name']}: {record['summary']}")
            for name, option in record.get("settings", {}).items():
                text = f" {option['description']}" if option["description"] else ""
                lines.append(f"      option {name} = {option['default']!r}{text}")
            capabilities = record.get("capabilities")
            if capabilities:
                lines.append(f"      {_capabilities_text(capabilities)}")
    others = [hook for hook, names in described["offers"].items() if not names]
    lines += [f"  {hook.removeprefix('minisgl_')}" for hook in others]
    return "\n".join(lines)


def _capabilities_text(capabilities: dict[str, Any]) -> str:
    parts = []
    for name, value in capabilities.items():
        text = "any" if value is None else value
        if isinstance(value, tuple):
            text = ", ".join(map(str, value))
        if isinstance(value, bool):
            text = "yes" if value else "no"
        parts.append(f"{name.replace('_', ' ')}: {text}")
    return "; ".join(parts)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=str)
