"""Reads settings from a file and from the environment, into dotted names."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_settings import EnvSettingsSource
from pydantic_settings import SettingsError as ParseError

from minisgl.errors import SettingsError, nearest
from minisgl.settings.model import ENV_DELIMITER, ENV_PREFIX, Settings
from minisgl.settings.names import OPTIONS, environment_name, fields, flatten

_SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML, YAML or JSON file by their dotted names.

    Raises:
        SettingsError: no such file, not of these formats, malformed, or with an unknown name.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise SettingsError(
            f"config={str(path)!r}: the file's name must end in one of {', '.join(_SUFFIXES)}."
        )
    try:
        content = _parse(path.suffix.lower(), path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config={str(path)!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise SettingsError(f"config={str(path)!r} is malformed: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise SettingsError(
            f"config={str(path)!r} holds a {type(content).__name__}; it must hold sections,"
            " such as [cache] with page_size = 16."
        )
    return flatten(content, f"file {path}")


def _parse(suffix: str, text: str) -> Any:
    """Parse the text of a configuration file; ``ValueError`` if it is malformed."""
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of all ``MINISGL_*`` variables by their dotted names.

    Raises:
        SettingsError: a variable that is no setting's, or malformed JSON.
    """
    own = {name: value for name, value in environ.items() if name.upper().startswith(ENV_PREFIX)}
    for name in own:
        _check_variable(name)
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): value for name, value in own.items()}
    try:
        nested = source()
    except ParseError as error:
        raise SettingsError(
            f"{environment_name(OPTIONS)} must hold a JSON object of backends and their options:"
            f" {error.__cause__}."
        ) from error
    return flatten(nested, "environment")


def _check_variable(name: str) -> None:
    """Refuse a variable that is not ``MINISGL_SECTION__FIELD`` of a setting."""
    known = {environment_name(setting) for setting, _ in fields()}
    prefix = environment_name(OPTIONS) + ENV_DELIMITER
    upper = name.upper()
    rest = upper.removeprefix(prefix)
    if upper in known or (rest != upper and all(rest.split(ENV_DELIMITER, 1)[:2]) and "__" in rest):
        return
    hint = nearest(upper, [*known, prefix + "BACKEND__OPTION"])
    raise SettingsError(
        f"Unknown environment variable {name!r}: variables that start with {ENV_PREFIX} are"
        f" settings, written MINISGL_SECTION__FIELD.{hint}"
    )
