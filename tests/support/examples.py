"""How many examples a property test runs: hypothesis profiles, and the seed that repeats a run."""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings

DEFAULT, DEEP = 200, 5_000


def register_profiles() -> None:
    """Register ``default``, ``deep`` (``make test-deep``) and those of mutations; load ``default``.

    Examples have no deadline, since machines differ, and a failing one prints the decorator that
    repeats it. ``explicit`` draws none: what it catches, it catches in every run.
    """
    default = settings(max_examples=DEFAULT, deadline=None, print_blob=True)
    settings.register_profile("default", default)
    settings.register_profile("deep", default, max_examples=DEEP)
    of_mutations = settings(
        default,
        report_multiple_bugs=False,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.register_profile("explicit", of_mutations, phases=[Phase.explicit])
    drawn = [Phase.generate, Phase.shrink]
    settings.register_profile("drawn", of_mutations, max_examples=1_000, phases=drawn)
    settings.load_profile("default")


def scaled(examples: int) -> int:
    """Return ``examples`` of a default run, scaled to the profile: for costly examples only.

    Say beside each use what makes one example costly.
    """
    return max(1, examples * settings.default.max_examples // DEFAULT)


def choose_seed(config: pytest.Config) -> None:
    """Give the run a seed unless the command line does; xdist hands it to the workers."""
    if config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def seed_line(config: pytest.Config) -> str:
    """Return what to type to draw the same examples again."""
    seed = config.getoption("hypothesis_seed")
    return f"hypothesis seed {seed}: the same examples again with --hypothesis-seed={seed}"
