"""Throw-away distributions: a dist-info folder and a module, on ``sys.path`` for one test."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent

import pytest
from packaging.utils import canonicalize_name

from minisgl.plugins.discovery import Candidate, find_candidates
from minisgl.plugins.host import PluginHost, load_plugins
from support.distributions import FOLDERS
from support.patience import PATIENCE

CORE_RANGE = "minisgl-core>=0.1,<0.2"

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""


class PluginSite:
    """A folder like ``site-packages``, and ways to load what is in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: set[str] = set()
        self.distributions: set[str] = set()

    def add(
        self,
        distribution: str,
        code: str,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (CORE_RANGE,),
        entry_points: Sequence[str] | None = None,
        folder: Path | None = None,
    ) -> str:
        """Write a distribution whose module holds ``code``; returns the module's name."""
        root = folder or self.root
        module = distribution.lower().replace("-", "_").replace(".", "_") + "_plugin"
        self.modules.add(module)
        self.distributions.add(canonicalize_name(distribution))
        root.mkdir(exist_ok=True)
        (root / f"{module}.py").write_text(dedent(code))
        info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        points = entry_points if entry_points is not None else [f"main = {module}"]
        (info / "entry_points.txt").write_text("[minisgl]\n" + "\n".join(points) + "\n")
        importlib.invalidate_caches()
        return module

    def candidates(self) -> list[Candidate]:
        """Return what is installed, but for this repository's plugins of kernels.

        Tests name the backends that they expect, whichever of those the environment has.
        """
        hidden = {*FOLDERS} - {"minisgl-core", "minisgl-models"} - self.distributions
        return [found for found in find_candidates() if found.distribution not in hidden]

    def load(self, **options: object) -> PluginHost:
        """Load all plugins in this process."""
        return load_plugins(**options)  # type: ignore[arg-type]

    def python(self, code: str, *, blocked: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in a fresh process that sees this site and cannot import ``blocked``."""
        script = f"BLOCKED = {set(blocked)!r}\n{BLOCKER}\n{dedent(code)}"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MINISGL_")}
        # Prepended: where minisgl is not installed but on the path, that path is still needed.
        inherited = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.root), inherited)))
        return subprocess.run(
            [sys.executable, "-c", script],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )


@pytest.fixture
def plugin_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSite]:
    site = PluginSite(tmp_path / "site")
    site.root.mkdir()
    monkeypatch.syspath_prepend(str(site.root))
    monkeypatch.setattr("minisgl.plugins.host.find_candidates", site.candidates)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)
