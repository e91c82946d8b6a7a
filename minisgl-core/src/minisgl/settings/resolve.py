"""Merges the sources of settings: command line > environment > file > default."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from minisgl.errors import SettingsError, nearest
from minisgl.settings.keywords import collect_keywords
from minisgl.settings.model import Settings
from minisgl.settings.names import OPTIONS, check_name, fields, unflatten
from minisgl.settings.sources import read_environment, read_file

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings, and where each value comes from.

    Attributes:
        settings: the validated settings.
        sources: ``command line``, ``environment``, ``file PATH`` or ``default`` by dotted name.
    """

    settings: Settings
    sources: Mapping[str, str]

    def entries(self) -> Iterator[tuple[str, Any, str]]:
        """Yield dotted name, value and source of every setting; secrets stay masked."""
        for name, source in self.sources.items():
            yield name, setting_value(self.settings, name), source

    def with_defaults(self, values: Mapping[str, Any], source: str) -> "ResolvedSettings":
        """Return settings in which ``values`` stand where nobody has given anything.

        Args:
            values: by dotted name.
            source: who says so, for listings.
        """
        taken = {name: value for name, value in values.items() if self.sources[name] == DEFAULT}
        sections = {}
        for section, fresh in unflatten(taken).items():
            before = getattr(self.settings, section)
            sections[section] = type(before).model_validate(before.model_dump() | fresh)
        settings = self.settings.model_copy(update=sections)
        return ResolvedSettings(settings, {**self.sources, **dict.fromkeys(taken, source)})


def setting_value(settings: Settings, name: str) -> Any:
    """Return the value of a dotted name."""
    section, *rest = name.split(".", 2)
    value = getattr(settings, section)
    for part in rest:
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    if isinstance(value, tuple):
        return tuple(map(_masked, value))
    return _masked(value)


def _masked(value: Any) -> Any:
    return str(value) if isinstance(value, SecretStr) else value


def resolve_settings(
    *,
    flags: Mapping[str, Any],
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> ResolvedSettings:
    """Merge flags, environment, file and defaults, in this order of precedence.

    Args:
        flags: values by dotted name, as ``minisgl.cli.flags.collect`` returns them.
        config: a TOML, YAML or JSON file.
        environ: the environment; ``None`` takes this process's.

    Raises:
        SettingsError: a name is unknown or a value is not allowed; one line for each fault.
    """
    return _resolve(dict(flags), "command line", config, environ)


def settings_from_keywords(
    *, config: str | Path | None = None, environ: Mapping[str, str] | None = None, **flat: Any
) -> Settings:
    """Return settings from keywords, as ``LLM`` takes them, over environment, file and defaults.

    Args:
        config: a TOML, YAML or JSON file.
        environ: the environment; ``None`` takes this process's.
        **flat: flat names and their aliases with underscores (``page_size=16``,
            ``max_model_len=4096``), or a whole section as a mapping (``scheduler={...}``).

    Raises:
        SettingsError: a name is unknown or a value is not allowed; one line for each fault.
    """
    path = None if config is None else Path(config)
    return _resolve(collect_keywords(flat), "keyword", path, environ).settings


def _resolve(
    explicit: dict[str, Any], source: str, config: Path | None, environ: Mapping[str, str] | None
) -> ResolvedSettings:
    for name in explicit:
        check_name(name, source)
    values: dict[str, Any] = {}
    sources = {name: DEFAULT for name, _ in fields() if name != OPTIONS}
    layers = [
        (f"file {config}", read_file(config) if config is not None else {}),
        ("environment", read_environment(os.environ if environ is None else environ)),
        (source, explicit),
    ]
    for label, layer in layers:
        values |= layer
        sources |= dict.fromkeys(layer, label)
    try:
        settings = Settings(**unflatten(values))
    except ValidationError as error:
        raise _settings_error(error, values, sources) from None
    return ResolvedSettings(settings, sources)


def _settings_error(
    error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str]
) -> SettingsError:
    """Turn a validation error into one line for each fault."""
    described = dict(fields())
    lines = []
    for fault in error.errors(include_url=False):
        name = ".".join(str(part) for part in fault["loc"][:2])
        value = "..." if _is_secret(described.get(name)) else repr(values.get(name, fault["input"]))
        lines.append(f"{name}={value} ({sources.get(name, DEFAULT)}) {_requirement(fault)}")
    if len(lines) == 1:
        return SettingsError(lines[0])
    return SettingsError("\n  ".join([f"{len(lines)} settings are wrong:", *lines]))


def _is_secret(field: FieldInfo | None) -> bool:
    return field is not None and "Secret" in str(field.annotation)


def _requirement(fault: Any) -> str:
    """Say what a value must be, in our words, with the nearest allowed one."""
    message: str = fault["msg"]
    message = message.removeprefix("Value error, ")
    message = re.sub(r"^\w+ should ", "must ", message)
    if fault["type"] == "path_type":
        message = "must be a path"
    if fault["type"] == "literal_error":
        allowed = fault["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return f"{message}.{nearest(str(fault['input']), allowed)}"
    return f"{message}."


def validation_lines(error: ValidationError, prefix: str) -> list[str]:
    """Return one line for each fault of another model's values, such as a backend's options."""
    return [
        f"{'.'.join([prefix, *map(str, fault['loc'])])}={fault['input']!r} {_requirement(fault)}"
        for fault in error.errors(include_url=False)
    ]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file."""
    return Settings.model_json_schema()
