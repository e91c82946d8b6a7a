import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.distributions import FOLDERS, ROOT


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Wheels by the name of their folder, built as `pip install` builds them."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([*command, *(str(ROOT / name) for name in FOLDERS)], check=True)
    built = {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
    assert sorted(built) == FOLDERS
    return built


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory) -> Path:
    """This environment's packages without ours: links to all but minisgl's own files."""
    folder = tmp_path_factory.mktemp("dependencies")
    for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(source).iterdir():
            ours = entry.name.lstrip("_").startswith(("minisgl", "editable"))
            if not ours and entry.suffix != ".pth" and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


class Installation:
    """A folder with some of the wheels in it, and a Python that sees only it and the needs."""

    def __init__(self, folder: Path, dependencies: Path) -> None:
        self.folder = folder
        self._path = os.pathsep.join((str(folder), str(dependencies)))

    def install(self, wheel: Path) -> None:
        shutil.unpack_archive(wheel, self.folder, "zip")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run python with arguments; -S leaves out the environment's own packages."""
        return subprocess.run(
            [sys.executable, "-S", "-P", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": self._path},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def installation(tmp_path, dependencies) -> Installation:
    return Installation(tmp_path, dependencies)
