"""``minisgl bench write-config``: a folder to measure a published shape with, without weights."""

import argparse
from pathlib import Path

from minisgl.cli.flags import add_settings_arguments
from minisgl.settings import ResolvedSettings

SUMMARY = "write the config.json of a published model, to measure with --load-format dummy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the folder."""
    from minisgl.benchmark.published import CONFIGS

    parser.add_argument("name", metavar="NAME", help=", ".join(CONFIGS))
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER",
        help="where to; benchmarks name the model by the last part of it",
    )  # fmt: skip
    add_settings_arguments(parser, only=("log.level",))


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:  # noqa: ARG001
    """Write it and say where."""
    from minisgl.benchmark.published import write_config

    print(write_config(args.name, args.folder))
    return 0
