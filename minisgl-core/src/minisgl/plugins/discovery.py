"""Finds the distributions that offer a plugin, without importing anything of theirs."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata

from packaging.utils import canonicalize_name

GROUP = "minisgl"
CORE = "minisgl-core"

logger = logging.getLogger(__name__)


def core_version() -> str:
    """Return the version of the core that runs; metadata of an editable install may lag behind."""
    version: str = import_module("minisgl").__version__
    return version


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installed distribution with entry points in the group ``minisgl``.

    Attributes:
        distribution: normalised name; this is the plugin's identity.
        version: as in its metadata.
        requirements: its ``Requires-Dist`` lines.
        modules: what its entry points name, in the order of the metadata.
    """

    distribution: str
    version: str
    requirements: tuple[str, ...]
    modules: tuple[str, ...]


def find_candidates() -> list[Candidate]:
    """Return the candidates in distribution order.

    Of several copies of one distribution on ``sys.path`` the first counts, as it does for
    ``import`` and for ``importlib.metadata``. Core itself is always among them, installed or not.
    """
    core = Candidate(CORE, core_version(), (), ("minisgl.plugins.builtin",))
    found = {CORE: core}
    for candidate in _candidates():
        found.setdefault(candidate.distribution, candidate)
    return [found[name] for name in sorted(found)]


def _candidates() -> Iterator[Candidate]:
    seen: set[str] = set()
    for distribution in metadata.distributions():
        # Entry points first: hundreds of others have none, and long metadata that need no parsing.
        if not _modules(distribution):
            continue
        name = _name(distribution)
        if name is None or name in seen:
            continue
        seen.add(name)
        first = next(one for one in metadata.distributions(name=name) if _name(one) == name)
        modules = _modules(first)
        if not modules:
            logger.debug("another copy of %s on sys.path is not used", name)
            continue
        requirements = tuple(first.requires or ())
        yield Candidate(name, first.version or "unknown", requirements, modules)


def _modules(distribution: metadata.Distribution) -> tuple[str, ...]:
    return tuple(entry.value for entry in distribution.entry_points if entry.group == GROUP)


def _name(distribution: metadata.Distribution) -> str | None:
    """Return the normalised name, or ``None`` for the remains of a broken installation."""
    try:
        name = distribution.metadata["Name"]
    except (KeyError, OSError, TypeError, ValueError) as error:
        logger.debug("unreadable metadata of a distribution is skipped: %s", error)
        return None
    return canonicalize_name(name) if name else None
