"""``minisgl bench NAME``: measure production code and print a table, or JSON."""

import argparse
from importlib import import_module

from minisgl.settings import ResolvedSettings

BENCHMARKS = {
    "offline": "minisgl.cli.bench.offline",
    "serve": "minisgl.cli.bench.serve",
    "frontend": "minisgl.cli.bench.frontend",
    "kernels": "minisgl.cli.bench.kernels",
    "host": "minisgl.cli.bench.host",
    "trace": "minisgl.cli.bench.trace",
    "write-config": "minisgl.cli.bench.write_config",
}
"""Module of each; none of them imports torch before it runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="|".join(BENCHMARKS))
    for name, path in BENCHMARKS.items():
        module = import_module(path)
        summary: str = module.SUMMARY
        one = actions.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        module.add_arguments(one)


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Run the benchmark that was named."""
    code: int = import_module(BENCHMARKS[args.action]).run(args, resolved)
    return code
