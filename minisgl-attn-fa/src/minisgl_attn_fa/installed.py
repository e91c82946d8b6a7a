"""Which FlashAttention is installed, found without importing it.

Versions 2 and 4 share the import name ``flash_attn``: 4 is the folder ``flash_attn/cute`` without
a file above it, 2 a package that holds an older ``cute`` of its own. So files are looked for where
the import system would find ``flash_attn``, and the versions are those of the distributions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

VersionName = Literal["fa4", "fa3", "fa2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One FlashAttention, and where it comes from.

    Attributes:
        title: for people.
        distribution: its name on an index.
        tested: versions that the calls in ``kernels.py`` were written for.
        module: top-level import name.
        file: of that package, which only this version has; empty for a single module.
        needs: other top-level modules that its import needs, and the distributions of those.
        how_to_install: the way out if it is not there.
    """

    title: str
    distribution: str
    tested: SpecifierSet
    module: str
    file: str = ""
    needs: tuple[tuple[str, str], ...] = ()
    how_to_install: str


RELEASES: Final[Mapping[VersionName, Release]] = MappingProxyType(
    {
        "fa4": Release(
            title="FlashAttention 4",
            distribution="flash-attn-4",
            tested=SpecifierSet(">=4.0.0b36,<4.1", prereleases=True),
            module="flash_attn",
            file="cute/paged_kv.py",
            needs=(
                ("cutlass", "nvidia-cutlass-dsl"),
                ("quack", "quack-kernels"),
                ("tvm_ffi", "apache-tvm-ffi"),
            ),
            how_to_install="pip install 'minisgl-attn-fa[fa4]'",
        ),
        "fa3": Release(
            title="FlashAttention 3",
            distribution="flash-attn-3",
            tested=SpecifierSet(">=3.0.0b1,<4", prereleases=True),
            module="flash_attn_interface",
            how_to_install="build it from the folder hopper/ of FlashAttention's sources",
        ),
        "fa2": Release(
            title="FlashAttention 2",
            distribution="flash-attn",
            tested=SpecifierSet(">=2.7,<3", prereleases=True),
            module="flash_attn",
            file="flash_attn_interface.py",
            how_to_install=(
                "pip install --no-build-isolation 'minisgl-attn-fa[fa2]', which compiles for an "
                "hour"
            ),
        ),
    }
)
"""In the order in which ``auto`` asks."""


def installed_version(name: VersionName) -> str | None:
    """Return the installed version; ``None`` if there is none."""
    try:
        return version(RELEASES[name].distribution)
    except PackageNotFoundError:
        return None


def why_unusable(name: VersionName) -> str | None:
    """Return why this FlashAttention cannot be used at all, and the way out; ``None`` if it can."""
    release = RELEASES[name]
    wanted = f"{release.distribution}{release.tested}"
    found = installed_version(name)
    if found is None:
        return f"needs {wanted}, which is not installed: {release.how_to_install}"
    try:
        tested = Version(found) in release.tested
    except InvalidVersion:
        tested = False
    if not tested:
        return f"is tested with {wanted}, found {found}, which is untested: install '{wanted}'"
    if not _is_importable(release):
        return (
            f"{release.distribution} {found} is listed as installed, but {release.module}/"
            f"{release.file} is not where Python finds {release.module}: install it again, last"
        )
    for module, distribution in release.needs:
        if find_spec(module) is None:
            return (
                f"{release.distribution} {found} needs {distribution}, which is not installed: "
                f"pip install {distribution}"
            )
    return None


def folder_of(name: VersionName) -> Path:
    """Return the folder of the sources of a version that can be used, found without importing."""
    file = _file(RELEASES[name])
    assert file is not None
    return file.parent


def _is_importable(release: Release) -> bool:
    if not release.file:
        return find_spec(release.module) is not None
    return _file(release) is not None


def _file(release: Release) -> Path | None:
    """Return where the file is that only this version has; ``None``: nowhere."""
    spec = find_spec(release.module)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    files = (Path(folder) / release.file for folder in folders)
    return next((file for file in files if file.is_file()), None)
