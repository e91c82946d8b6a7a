"""Order of the whole suite, and how its property tests draw their examples."""

import os
import signal
from pathlib import Path

import pytest
import torch

from support.examples import choose_seed, register_profiles, seed_line

register_profiles()

LONGEST = (
    "integration/test_smollm2.py",
    "integration/server/test_silence.py",
    "mutations/test_mutations.py",
    "integration/test_tensor_parallel.py",
    "integration/test_exactness.py",
    "integration/server/test_public_cases.py",
    "integration/server/test_ranks.py",
    "integration/server/test_lifecycle.py",
    "faults/test_start.py",
    "core/kernel/test_triton.py",
    "moe_triton/test_backend.py",
    "docs/test_readme_runs.py",
    "integration/test_transformers_models.py",
    "integration/test_structured.py",
    "core/structured/test_xgrammar.py",
    "core/distributed/test_rank_group.py",
    "clients/test_openai.py",
    "faults/test_hangs.py",
)
"""Files that take more than half a minute, the longest first."""

if not torch.cuda.is_available():
    # Read when triton is imported: without a card its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed before hypothesis' own plugin reads it."""
    choose_seed(config)
    # A shell that starts this in the background has Ctrl-C ignored, which some tests press.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the seed, whether or not something failed."""
    terminalreporter.write_line(seed_line(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a card where there is none, and begin with the files that take longest.

    After them come others that hold slow tests, so that parallel workers end together; within a
    file nothing moves.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path, len(places)), item.path not in slow))
