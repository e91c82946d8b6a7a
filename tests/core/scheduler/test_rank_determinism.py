"""Invariant 13 (DESIGN section 7): equal messages give byte-identical plans on every rank."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given

from support.plan_digest import Rank
from support.schedules import Ask, plain, schedules, set_ups


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Rank]]:
    """Two processes that iterate over sets of strings, and of objects, in different orders."""
    processes = [Rank(hash_seed, dict(os.environ)) for hash_seed in (0, 4242)]
    yield processes
    for process in processes:
        process.close()


# Eight rows begin together, eight times: two ranks whose orders differ cannot agree by chance.
@pytest.mark.slow
@example(
    set_up=plain(rows=8, budget=40),
    schedule=[Ask(place // 8 * 5, (2 + place % 8,), 3, min_tokens=3) for place in range(64)],
)
@given(set_up=set_ups(max_spare=1), schedule=schedules(with_aborts=True, max_size=9))
def test_invariant_13_plans_do_not_depend_on_hash_seed_or_memory(
    ranks: list[Rank], set_up: dict[str, Any], schedule: list[Ask]
) -> None:
    """Whatever comes, goes, is aborted or retracted: two ranks encode the same words.

    Catches: the running set iterated in identity order, so that two tensor-parallel ranks
    computed different requests; a victim or a seed that depends on hashes; unset padding bytes.
    """
    first, second = (rank.digest(set_up, schedule) for rank in ranks)
    assert first == second
