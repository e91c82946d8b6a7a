"""From bytes to pages."""

from typing import Any

import pytest
import torch

from minisgl.engine.memory_plan import DeviceMemory, MemoryPlan, Needs, measure, plan_memory
from minisgl.errors import DoesNotFitError

GIB = 2**30


def plan(**changes: Any) -> MemoryPlan:
    values: dict[str, Any] = {
        "memory": DeviceMemory(total=10 * GIB, free=6 * GIB),
        "fraction": 0.9,
        "weights": 3 * GIB,
        "needs": Needs(),
        "bytes_per_page": 2**20,
        "page_size": 16,
        "num_pages": None,
        "max_useful_tokens": 10**9,
        "in_main_memory": False,
    }
    return plan_memory(**{**values, **changes})


def test_the_pool_takes_the_fraction_less_what_is_in_use() -> None:
    # 0.9 x 10 GiB less 4 GiB in use: 5 GiB of 1 MiB pages, one of them the dummy page.
    assert plan().num_pages == 5 * 1024 - 1


def test_the_pool_leaves_room_for_the_activations_of_the_largest_step() -> None:
    assert plan(needs=Needs(activations=2 * GIB)).num_pages == 3 * 1024 - 1


def test_graphs_are_in_use_already_and_not_counted_twice() -> None:
    """They are held while the device is measured."""
    assert plan(needs=Needs(graphs=GIB)).num_pages == plan().num_pages


def test_penalties_and_masks_are_taken_off_where_they_are_not_allocated_yet() -> None:
    """Catches: a pool in main memory that leaves no room for them, or two ranks that share one."""
    controls = Needs(controls=GIB)
    assert plan(needs=controls).num_pages == plan().num_pages
    in_main = plan(in_main_memory=True, memory=DeviceMemory(total=10 * GIB, free=5 * GIB))
    less = plan(
        in_main_memory=True, memory=DeviceMemory(total=10 * GIB, free=5 * GIB), needs=controls
    )
    assert in_main.num_pages - less.num_pages == 1024
    assert "penalties and masks, if all use them" in less.table()
    assert "penalties and masks 1.00 GiB" in plan(needs=controls).table()


def test_the_pool_is_no_larger_than_it_could_ever_be_used() -> None:
    assert plan(max_useful_tokens=100).num_pages == 7


def test_main_memory_is_taken_sparingly() -> None:
    assert plan(in_main_memory=True).num_pages == 4 * 1024 - 1


def test_ranks_of_one_machine_share_its_memory() -> None:
    assert plan(in_main_memory=True, num_sharers=4).num_pages == 1023
    with pytest.raises(DoesNotFitError, match=r"leaves 0\.00 GiB for each of 5120 ranks"):
        plan(num_sharers=5120)


def test_the_users_number_is_taken_as_it_is() -> None:
    assert plan(num_pages=123).num_pages == 123


def test_what_does_not_fit_names_the_numbers_and_the_setting() -> None:
    with pytest.raises(DoesNotFitError, match=r"10\.00 GiB x engine\.memory_fraction 0\.4"):
        plan(fraction=0.4)


def test_activations_that_leave_no_room_are_named() -> None:
    message = r"4\.00 GiB in use and 5\.00 GiB of activations leaves 0\.00 GiB, and a page"
    with pytest.raises(DoesNotFitError, match=message):
        plan(needs=Needs(activations=5 * GIB))


def test_the_table_adds_up_and_says_how_many_tokens() -> None:
    table = plan(num_pages=1023).table()
    assert "1023 pages of 16 = 16368 tokens" in table
    assert "weights 3.00 GiB" in table
    assert "left               5.00 GiB" in table
    assert "activations" not in table, "nothing is said of what was not measured"
    assert "graphs" not in table


def test_the_table_shows_what_steps_take_and_still_adds_up() -> None:
    needs = Needs(activations=2 * GIB, graphs=GIB // 2)
    assert plan(num_pages=1023, needs=needs).table().splitlines() == [
        "  device memory     10.00 GiB",
        "  in use             4.00 GiB  of which weights 3.00 GiB, CUDA graphs 0.50 GiB",
        "  activations        2.00 GiB  of the largest step",
        "  KV pool            1.00 GiB  1023 pages of 16 = 16368 tokens",
        "  left               3.00 GiB",
    ]


def test_main_memory_is_measured() -> None:
    memory = measure(torch.device("cpu"))
    assert 0 < memory.free <= memory.total
