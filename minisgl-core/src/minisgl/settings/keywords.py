"""Turns keywords of ``LLM`` into dotted names: flat names, aliases, or whole sections."""

from collections.abc import Mapping
from typing import Any

from minisgl.errors import SettingsError, nearest
from minisgl.settings.model import Settings
from minisgl.settings.names import FLAT_NAMES, PAIR_NAMES, SWITCHES, FlatName, Switch, flatten


class Assignments:
    """Collects (spelling, setting, value) and refuses two spellings that disagree."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._spellings: dict[str, str] = {}

    def add(self, spelling: str, setting: str, value: Any) -> None:
        """Set ``setting``; the same spelling may be repeated, then the later one holds.

        Raises:
            SettingsError: another spelling gave another value.
        """
        earlier = self._spellings.get(setting, spelling)
        if earlier != spelling and self.values[setting] != value:
            raise SettingsError(
                f"{earlier} and {spelling} both set {setting}, to {self.values[setting]!r} and"
                f" {value!r}. Give one of them."
            )
        self.values[setting] = value
        self._spellings[setting] = spelling


def join_pair(prefill: str | None, decode: str | None) -> str:
    """Return ``PREFILL,DECODE``; a half that is not given is ``auto``."""
    return f"{prefill or 'auto'},{decode or 'auto'}"


def collect_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``keywords`` by dotted name. ``None`` means "not given".

    Raises:
        SettingsError: an unknown keyword, or two that disagree.
    """
    flat: dict[str, FlatName | Switch] = {
        spelling.replace("-", "_"): entry
        for entry in FLAT_NAMES
        for spelling in (entry.name, *entry.aliases)
    }
    flat |= {switch.name.replace("-", "_"): switch for switch in SWITCHES}
    pair = {name.replace("-", "_"): keywords.get(name.replace("-", "_")) for name in PAIR_NAMES}
    assignments = Assignments()
    for keyword, value in keywords.items():
        if value is None:
            continue
        if keyword in Settings.model_fields and isinstance(value, Mapping):
            for setting, item in flatten({keyword: value}, f"keyword {keyword!r}").items():
                assignments.add(f"{keyword}={{...}}", setting, item)
        elif keyword in pair:
            assignments.add(" and ".join(pair), "attention.backend", join_pair(*pair.values()))
        elif keyword in flat:
            entry = flat[keyword]
            assignments.add(keyword, entry.setting, _flat_value(keyword, entry, value))
        else:
            raise _unknown(keyword, [*flat, *pair])
    return assignments.values


def _flat_value(keyword: str, entry: FlatName | Switch, value: Any) -> Any:
    if isinstance(entry, FlatName):
        return value
    if not isinstance(value, bool):
        raise SettingsError(f"{keyword}={value!r} must be True or False.")
    return entry.on if value else entry.off


def _unknown(keyword: str, flat: list[str]) -> SettingsError:
    if keyword in Settings.model_fields:
        return SettingsError(
            f"{keyword!r} is a section of settings: give a mapping, such as {keyword}={{...}}."
        )
    known = [*flat, *Settings.model_fields, "config"]
    return SettingsError(f"Unknown keyword {keyword!r}.{nearest(keyword, known)}")
