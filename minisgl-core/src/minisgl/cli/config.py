"""``minisgl config show | schema``."""

import argparse
import json
from pathlib import Path
from typing import Any

from minisgl.cli.flags import add_settings_arguments
from minisgl.settings import ResolvedSettings, json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="show|schema")
    show = actions.add_parser(
        "show",
        help="every setting, its value and where that comes from",
        description="Show every setting, its value and where that comes from.",
        allow_abbrev=False,
    )
    show.add_argument("--json", action="store_true", help="as JSON")
    add_settings_arguments(show)
    actions.add_parser(
        "schema",
        help="the JSON Schema of a configuration file",
        description="Print the JSON Schema of a configuration file.",
        allow_abbrev=False,
    )


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Print what was asked for."""
    if args.action == "schema":
        print(json.dumps(json_schema(), indent=2))
    elif args.json:
        entries = {
            name: {"value": value, "source": source} for name, value, source in resolved.entries()
        }
        print(json.dumps(entries, indent=2, default=_plain))
    else:
        rows = [(name, _text(value), source) for name, value, source in resolved.entries()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, value, source in rows:
            print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")
    return 0


def _plain(value: Any) -> str:
    return str(value)


def _text(value: Any) -> str:
    """Write a value as a TOML file would, and an unset one as a dash."""
    if value is None:
        return "-"
    if isinstance(value, Path):
        return json.dumps(str(value))
    return json.dumps(value, default=_plain)
