"""What the documents say exists: links, files, tests, commands, flags and make targets."""

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from minisgl.cli import COMMANDS
from minisgl.cli.parser import Parser
from support.distributions import FOLDERS, ROOT
from support.markdown import anchors, blocks, links

DOCUMENTS = sorted(
    path
    for folder in (".", "docs", "examples", "benchmarks", *FOLDERS)
    for path in (ROOT / folder).glob("*.md")
)
IDS = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "minisgl-core" / "src" / "minisgl"
OTHER_PROGRAMS = {"pip", "curl", "python", "hf"}


def commands(path: Path) -> list[list[str]]:
    """Return the words of each command in the shell blocks of a document."""
    found = []
    for block in blocks(path, "sh", "console"):
        for line in block.text.splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                found.append(words)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_relative_link_resolves(path):
    for target in links(path):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors(file), f"{target}: {file.name} has no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_python_block_compiles(path):
    for block in blocks(path, "python"):
        compile(block.text, f"{path.name}:{block.line}", "exec")


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_command_exists_with_its_flags(path):
    for words in commands(path):
        program = Path(words[0]).name
        if program == "make":
            check_make(words[1:])
        elif program == "minisgl":
            check_minisgl(words[1:])
        elif program == "bash":
            assert (ROOT / words[1]).is_file(), words
        else:
            assert program in OTHER_PROGRAMS, words


def check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    variables = set(re.findall(r"^(\w+) \?=", text, re.MULTILINE))
    for word in words:
        name, assigns, value = word.partition("=")
        assert name in (variables if assigns else targets), word
        if name == "ARGS":
            check_minisgl(["serve", *shlex.split(value)])


def check_minisgl(words: list[str]) -> None:
    command, *arguments = words
    assert command in COMMANDS, words
    if arguments == ["--help"]:
        return
    parser = Parser(prog=command, allow_abbrev=False)
    import_module(COMMANDS[command][0]).add_arguments(parser)
    parsed = parser.parse_strictly(arguments)
    assert isinstance(parsed, argparse.Namespace)
    for flag in ("config", "prompts"):
        name = getattr(parsed, flag, None)
        if name is not None and "examples" in str(name):
            assert (ROOT / name).is_file(), name


def test_commands_in_tables_exist():
    found = []
    for path in DOCUMENTS:
        for line in path.read_text(encoding="utf-8").splitlines():
            found += re.findall(r"`((?:make|\.venv/bin/\S+|minisgl) [^`<\[|]+)`", line)
    assert found
    for text in found:
        words = shlex.split(text)
        if words[0] == "make" and words[1] != "alone":
            check_make([word for word in words[1:] if not word.startswith("ARGS=")])
        elif Path(words[0]).name == "python":
            assert (ROOT / words[1]).is_file(), text
        elif words[0].endswith("minisgl") and any(w.startswith("--") for w in words):
            check_minisgl([word for word in words[1:] if word != "..."])


def test_every_file_that_the_architecture_names_exists():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+\.py)`", text))
    assert named
    missing = [name for name in named if not any((d / name).is_file() for d in (SOURCE, ROOT))]
    assert not missing


def test_the_architecture_walks_through_every_file_that_does_work():
    """A file of the core that the walk leaves out is either named here, or the walk is stale."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    beside = {
        # Other commands, and their own settings.
        "__main__.py", "cli/__main__.py", "cli/config.py", "cli/explain.py", "cli/plugins.py",
        "cli/parser.py", "settings/keywords.py", "settings/logs.py",
        # Declarations that the named files are made of.
        "kernel/rotation.py", "layers/rope_config.py", "models/config.py", "models/interface.py",
        "moe/interface.py", "attention/interface.py", "distributed/communicator.py",
        "plugins/builtin.py", "plugins/capabilities.py", "plugins/hookspecs.py",
        "plugins/lazy.py", "plugins/query.py", "plugins/records.py", "plugins/registry.py",
        "scheduler/interfaces.py", "errors.py",
    }  # fmt: skip
    files = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py" and "testing" not in path.parts
    }
    assert sorted(beside - files) == []
    assert sorted(name for name in files - beside if f"`{name}`" not in text) == []


def test_every_invariant_has_a_test_that_exists():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(23))
    for number, cell in rows:
        references = re.findall(r"`([Tt]est\w+)` \[[^\]]+\]\(([^)]+)\)", cell)
        assert references or cell.startswith("not yet"), f"invariant {number} names no test"
        for name, file in references:
            source = (ARCHITECTURE.parent / file).read_text(encoding="utf-8")
            defined = re.search(rf"^(def {name}\(|{name}\b)", source, re.MULTILINE)
            assert defined, f"invariant {number}: {file} has no {name}"


def test_every_promise_has_a_test_that_exists():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [
        row for row in re.findall(r"^\| .+ \|$", text, re.MULTILINE) if row != "| promise | test |"
    ]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, f"no test: {row}"
        for file, name in named:
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert f"def {name}(" in source, f"{file} has no {name}"


def test_no_document_names_a_value_that_only_a_run_could_tell():
    """Speeds come from a command, never from a document."""
    number = re.compile(r"\d[\d.,]*\s*(tok/s|tokens per second|tokens/s|x faster|times faster)")
    quoting = [p.name for p in DOCUMENTS if number.search(p.read_text(encoding="utf-8"))]
    assert quoting == []
