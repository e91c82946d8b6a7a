"""The distributions that this repository holds."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

FOLDERS = sorted(path.parent.name for path in ROOT.glob("minisgl-*/pyproject.toml"))
"""Folders of the distributions, which are also their names."""


def project(folder: str) -> dict[str, Any]:
    """Return the ``[project]`` table of a distribution."""
    text = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table
