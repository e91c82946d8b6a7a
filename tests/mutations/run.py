"""Gives the sources one known fault at a time and requires that the test named for it notices.

Each ``*.patch`` beside this file says which invariant it breaks, which fault of real systems it
re-creates, and which test has to fail. It is applied to a scratch copy of the sources; the test
runs there in a process of its own. Anything but a failure of that test (a patch that does not
apply, code that does not load, a time-out) is an error of the patch, never a success.

The processes are forked from one that has imported torch, transformers, hypothesis and pytest, but
nothing of this project: those imports would take longer than most of the tests.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ("minisgl-core/src", "minisgl-models/src", "tests")
TIMEOUT_S = 240
"""Of a run that draws no examples."""

PRELOADED = (
    *("hypothesis.stateful", "pytest", "torch", "transformers.models.llama.modeling_llama"),
    *("msgspec", "pydantic_settings", "zmq"),
)

# Errors that say that the patched code is no program, or that hypothesis found no examples.
_NO_VERDICT = {
    "AttributeError",
    "FailedHealthCheck",
    "ImportError",
    "IndentationError",
    "InvalidArgument",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "UnboundLocalError",
    "Unsatisfiable",
}


class MutationError(Exception):
    """A mutation that proves nothing; the message says why."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One patch.

    Attributes:
        path: of the file.
        invariant: number of the invariant that the fault breaks.
        fault: what goes wrong, in one line.
        test: node id of the test that must fail, from the repository's root.
    """

    path: Path
    invariant: int
    fault: str
    test: str

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem


@dataclass(frozen=True, slots=True)
class Caught:
    """The named test failed.

    Attributes:
        errors: of which kinds.
        seconds: that it took.
        example: of a property test, as hypothesis prints it.
    """

    errors: tuple[str, ...]
    seconds: float
    example: str


def mutations(folder: Path = HERE) -> list[Mutation]:
    """Return all mutations, in the order of their names."""
    return [read(path) for path in sorted(folder.glob("*.patch"))]


def read(path: Path) -> Mutation:
    """Read the preamble of a patch.

    Raises:
        MutationError: a line of it is missing.
    """
    preamble = path.read_text(encoding="utf-8").partition("\n--- ")[0]
    fields = dict(re.findall(r"^(Invariant|Fault|Test): (.+)$", preamble, re.MULTILINE))
    missing = {"Invariant", "Fault", "Test"} - set(fields)
    if missing:
        raise MutationError(f"{path.name} has no line {min(missing)!r} before its diff")
    return Mutation(path, int(fields["Invariant"]), fields["Fault"], fields["Test"])


def run(mutation: Mutation, *, seed: int | None = None) -> Caught:
    """Apply the mutation to a fresh copy and run its test there.

    Args:
        mutation: which.
        seed: of the examples that a property test draws; ``None`` draws none, so that what is
            caught is caught by the examples that the test names itself, in every run.

    Raises:
        MutationError: the test passed, or something else than the test failed.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder).resolve()
        _copy_sources(copy)
        _apply(mutation, copy)
        return _run_test(mutation, copy, seed)


def table(found: Iterable[Mutation]) -> str:
    """Return the table of the README."""
    rows = [
        f"| {one.invariant} | `{one.name}` | {one.fault} | `{one.test.rpartition('::')[2]}` |"
        for one in sorted(found, key=lambda one: (one.invariant, one.name))
    ]
    return "\n".join(["| | patch | fault | test |", "|---|---|---|---|", *rows])


def _copy_sources(target: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "*.patch", ".hypothesis")
    for source in SOURCES:
        shutil.copytree(ROOT / source, target / source, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)


def _apply(mutation: Mutation, copy: Path) -> None:
    # One line of context has to match, so that edits nearby do not matter.
    command = ["git", "apply", "-C1", "--whitespace=nowarn", str(mutation.path)]
    # Without this, git would take a repository around the temporary folder for its own.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    done = subprocess.run(
        command, cwd=copy, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise MutationError(f"{mutation.name} does not apply:\n{done.stderr}")


def _run_test(mutation: Mutation, copy: Path, seed: int | None) -> Caught:
    report, output = copy / "outcomes.json", copy / "output.txt"
    arguments = [
        *(mutation.test, "-x", "-q", "--no-header", "-p", "no:cacheprovider"),
        *("-p", "support.outcomes", f"--outcomes={report}"),
        *("-p", "pytest_timeout", "-o", "timeout=0"),
        *("-p", "_hypothesis_pytestplugin", f"--hypothesis-seed={seed or 0}"),
        f"--hypothesis-profile={'explicit' if seed is None else 'drawn'}",
        # What was imported before pytest began cannot have its own assertions explained.
        *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
    ]
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(PRELOADED))
    began = time.monotonic()
    process = processes.Process(target=_pytest, args=(copy, arguments, output))
    process.start()
    process.join(TIMEOUT_S if seed is None else None)
    if process.is_alive():
        process.kill()
        process.join()
        raise MutationError(f"{mutation.name}: no verdict after {TIMEOUT_S} s")
    seconds = time.monotonic() - began
    whole = output.read_text(errors="replace")
    printed = "\n".join(whole.splitlines()[-30:])
    if process.exitcode == 0:
        raise MutationError(f"{mutation.name} survives: {mutation.test} passes with it")
    if process.exitcode != 1 or not report.is_file():
        raise MutationError(f"{mutation.name}: pytest could not run the test:\n{printed}")
    errors = _errors(mutation, json.loads(report.read_text(encoding="utf-8")), copy)
    if errors is None:
        raise MutationError(f"{mutation.name}: the test did not judge the fault:\n{printed}")
    return Caught(errors, seconds, _example(whole))


def _pytest(copy: Path, arguments: list[str], output: Path) -> None:
    """In a process of its own: run pytest on the copy, which comes before what is installed."""
    with output.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    paths = [str(copy / source) for source in SOURCES]
    sys.path[:0] = paths
    for name in [name for name in os.environ if name.startswith(("PYTEST", "HYPOTHESIS"))]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # For processes that the test starts.
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.dont_write_bytecode = True
    os.chdir(copy)
    import pytest

    sys.exit(int(pytest.main(arguments)))


def _example(output: str) -> str:
    """Return the failing example that hypothesis has printed, without pytest's margin."""
    found = re.search(
        r"(?:Falsifying example|Failing test case): (.*?)\n\S*\s*\n", output, re.DOTALL
    )
    return re.sub(r"\nE {1,11}", "\n", found[1]) if found else ""


def _errors(mutation: Mutation, outcomes: dict[str, object], copy: Path) -> tuple[str, ...] | None:
    """Return the errors of the named test's failure; ``None`` if they are no verdict."""
    if not Path(str(outcomes["minisgl"])).is_relative_to(copy):
        raise MutationError(f"{mutation.name}: minisgl was not imported from the copy")
    failures = outcomes["failures"]
    assert isinstance(failures, list)
    for failure in failures:
        named = re.split(r"::test_\w+_lives|\[", failure["test"])[0] == mutation.test
        if named and failure["phase"] == "call" and not _NO_VERDICT & set(failure["errors"]):
            return tuple(failure["errors"])
    return None


def main(arguments: Sequence[str]) -> int:
    """Run the named mutations, or all; returns how many prove nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="patches, without .patch [all]")
    parser.add_argument(
        "--seed",
        type=int,
        help="draw examples with it, and print the one that fails [those in the tests]",
    )
    parser.add_argument("--table", action="store_true", help="print the table of the README")
    options = parser.parse_args(arguments)
    found = {one.name: one for one in mutations()}
    unknown = [name for name in options.names if name not in found]
    if unknown:
        parser.error(f"no patch {unknown[0]!r} here; there are: {', '.join(found)}")
    if options.table:
        _say(table(found.values()))
        return 0
    num_wrong = 0
    for name in options.names or found:
        try:
            caught = run(found[name], seed=options.seed)
            _say(f"{name:44} caught in {caught.seconds:5.1f} s: {', '.join(caught.errors)}")
            if options.seed is not None:
                _say(caught.example)
        except MutationError as error:
            num_wrong += 1
            _say(f"{name:44} WRONG: {error}")
    return num_wrong


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
