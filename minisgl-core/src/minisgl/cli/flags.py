"""The flags of all settings, and what was typed as values by dotted name.

Values stay strings here: the settings model converts and refuses them, so that a bad value reads
the same wherever it comes from.
"""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from minisgl.errors import SettingsError
from minisgl.settings.keywords import Assignments, join_pair
from minisgl.settings.names import FLAT_NAMES, PAIR_NAMES, SWITCHES, FlatName, Switch, fields

_DEST = "settings_given"


def add_settings_arguments(
    parser: argparse.ArgumentParser,
    *,
    positional_model: bool = False,
    only: Collection[str] | None = None,
) -> None:
    """Add the flags of the settings, their aliases, ``--set`` and ``--config``.

    Args:
        parser: of a command.
        positional_model: also take the model as a first positional argument.
        only: dotted names to limit the flags to; ``None`` adds all of them.
    """
    parser.set_defaults(**{_DEST: None, "config": None})
    group = parser.add_argument_group(
        "settings", "Also from MINISGL_SECTION__FIELD variables and --config; flags win."
    )
    if positional_model:
        group.add_argument(
            "positional_model",
            metavar="MODEL",
            nargs="?",
            action=_Record,
            setting="model.path",
            help="the same as --model",
        )
    described = dict(fields())
    for flat in FLAT_NAMES:
        if only is None or flat.setting in only:
            _add_flat(group, flat, described[flat.setting])
    for switch in SWITCHES:
        if only is None or switch.setting in only:
            _add_switch(group, switch)
    if only is None or "attention.backend" in only:
        for name in PAIR_NAMES:
            group.add_argument(
                f"--{name}", action=_Record, dest=_DEST, setting=name, help=argparse.SUPPRESS
            )
    group.add_argument(
        "--set",
        metavar="SECTION.FIELD=VALUE",
        action=_RecordAny,
        dest=_DEST,
        help="any setting by its dotted name, also backend_options.BACKEND.OPTION",
    )
    group.add_argument(
        "--config", metavar="FILE", type=Path, help="settings from a TOML, YAML or JSON file"
    )


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was typed, by dotted name.

    Raises:
        SettingsError: two spellings of one setting disagree.
    """
    assignments = Assignments()
    repeated = {flat.setting: f"--{flat.name}" for flat in FLAT_NAMES if flat.repeated}
    pair: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    for spelling, setting, value in getattr(args, _DEST, None) or ():
        if setting in PAIR_NAMES:
            pair[setting] = value
        elif setting in repeated:
            lists.setdefault(setting, []).extend(value.split(","))
            assignments.add(repeated[setting], setting, lists[setting])
        else:
            assignments.add(spelling, setting, value)
    if pair:
        joined = join_pair(*(pair.get(name) for name in PAIR_NAMES))
        assignments.add(" and ".join(f"--{name}" for name in pair), "attention.backend", joined)
    return assignments.values


def typed_settings(args: argparse.Namespace) -> frozenset[str]:
    """Return the dotted names of the settings that were typed, but for those of logging."""
    given = getattr(args, _DEST, None) or ()
    return frozenset(name for _, name, _ in given if not name.startswith("log."))


class _Record(argparse.Action):
    """Appends (spelling, setting, value); a switch has its value from ``const``."""

    def __init__(self, *args: Any, setting: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.setting = setting

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        if value is not None:
            _append(namespace, option_string or "MODEL", self.setting, value)


class _RecordAny(argparse.Action):
    """Appends what ``--set`` says."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setting, equals, value = str(values).partition("=")
        if not equals:
            raise SettingsError(f"{option_string} {values!r} must be SECTION.FIELD=VALUE.")
        _append(namespace, f"{option_string} {setting}", setting.strip(), value)


def _append(namespace: argparse.Namespace, spelling: str, setting: str, value: Any) -> None:
    given = [*(getattr(namespace, _DEST, None) or ()), (spelling, setting, value)]
    setattr(namespace, _DEST, given)


def _add_flat(group: Any, flat: FlatName, field: FieldInfo) -> None:
    also = [f"--{alias}" for alias in flat.aliases]
    default = f" [{flat.setting}{_default(field)}]"
    options = {"action": _Record, "dest": _DEST, "setting": flat.setting}
    text = f"{field.description}{default}" + (f" Also: {', '.join(also)}." if also else "")
    group.add_argument(
        f"--{flat.name}", *flat.short, metavar=_metavar(flat, field), help=text, **options
    )
    if also:
        group.add_argument(*also, help=argparse.SUPPRESS, **options)


def _add_switch(group: Any, switch: Switch) -> None:
    for name, value in ((switch.name, switch.on), (f"no-{switch.name}", switch.off)):
        if name == switch.name or switch.negatable:
            group.add_argument(
                f"--{name}",
                action=_Record,
                dest=_DEST,
                nargs=0,
                const=value,
                setting=switch.setting,
                help=f"The same as --set {switch.setting}={str(value).lower()}.",
            )


def _metavar(flat: FlatName, field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    kinds = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
    for kind in (annotation, *get_args(annotation)):
        if kind in kinds and not flat.repeated:
            return kinds[kind]
    return "NAME"


def _default(field: FieldInfo) -> str:
    return f", default {field.default}" if field.default not in (None, ()) else ""
