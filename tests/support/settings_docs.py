"""The table rows of docs/settings.md, made from the settings model.

``PYTHONPATH=tests python -m support.settings_docs`` rewrites the tables in the document.
"""

import re
from pathlib import Path

from minisgl.settings.model import Settings
from minisgl.settings.names import (
    FLAT_NAMES,
    OPTIONS,
    PAIR_NAMES,
    SWITCHES,
    environment_name,
    fields,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
TABLE = re.compile(r"(?<=\|---\|---\|---\|---\|\n)(\| `(\w+)\..*\n)+")


def spellings(setting: str) -> list[str]:
    """Return every flag that sets a setting, its own name first."""
    flags = []
    for flat in FLAT_NAMES:
        if flat.setting == setting:
            flags += [f"--{flat.name}", *flat.short, *(f"--{alias}" for alias in flat.aliases)]
    if setting == "attention.backend":
        flags += [f"--{name}" for name in PAIR_NAMES]
    for switch in SWITCHES:
        if switch.setting == setting:
            flags.append(f"--{switch.name}")
            flags += [f"--no-{switch.name}"] * switch.negatable
    return flags


def row(setting: str) -> str:
    """Return the line about one setting: name and environment, flags, default, description."""
    field = dict(fields())[setting]
    flags = ", ".join(f"`{flag}`" for flag in spellings(setting)) or f"`--set {setting}=...`"
    default = {None: "", (): "none"}.get(field.default, f"`{field.default}`")
    return (
        f"| `{setting}`<br>`{environment_name(setting)}` | {flags} | {default}"
        f" | {field.description} |\n"
    )


def rows(section: str) -> list[str]:
    """Return the lines of one section."""
    return [row(name) for name, _ in fields() if name.startswith(f"{section}.")]


def sections() -> list[str]:
    """Return the sections that have a table."""
    return [section for section in Settings.model_fields if section != OPTIONS]


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(TABLE.sub(lambda match: "".join(rows(match[2])), text))
