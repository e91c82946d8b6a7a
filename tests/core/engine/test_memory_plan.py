"""From bytes to pages."""

import pytest
import torch

from minisgl.engine.memory_plan import DeviceMemory, measure, plan_memory
from minisgl.errors import DoesNotFitError

GIB = 2**30


def plan(**changes: object) -> object:
    values: dict[str, object] = {
        "memory": DeviceMemory(total=10 * GIB, free=6 * GIB),
        "fraction": 0.9,
        "weights": 3 * GIB,
        "bytes_per_page": 2**20,
        "page_size": 16,
        "num_pages": None,
        "max_useful_tokens": 10**9,
        "in_main_memory": False,
    }
    return plan_memory(**{**values, **changes})  # type: ignore[arg-type]


def test_the_pool_takes_the_fraction_less_what_is_in_use() -> None:
    # 0.9 x 10 GiB less 4 GiB in use: 5 GiB of 1 MiB pages, one of them the dummy page.
    assert plan().num_pages == 5 * 1024 - 1  # type: ignore[attr-defined]


def test_the_pool_is_no_larger_than_it_could_ever_be_used() -> None:
    assert plan(max_useful_tokens=100).num_pages == 7  # type: ignore[attr-defined]


def test_main_memory_is_taken_sparingly() -> None:
    assert plan(in_main_memory=True).num_pages == 4 * 1024 - 1  # type: ignore[attr-defined]


def test_ranks_of_one_machine_share_its_memory() -> None:
    assert plan(in_main_memory=True, num_sharers=4).num_pages == 1023  # type: ignore[attr-defined]
    with pytest.raises(DoesNotFitError, match=r"leaves 0\.00 GiB for each of 5120 ranks"):
        plan(num_sharers=5120)


def test_the_users_number_is_taken_as_it_is() -> None:
    assert plan(num_pages=123).num_pages == 123  # type: ignore[attr-defined]


def test_what_does_not_fit_names_the_numbers_and_the_setting() -> None:
    with pytest.raises(DoesNotFitError, match=r"10\.00 GiB x engine\.memory_fraction 0\.4"):
        plan(fraction=0.4)


def test_the_table_adds_up_and_says_how_many_tokens() -> None:
    table = plan(num_pages=1023).table()  # type: ignore[attr-defined]
    assert "1023 pages of 16 = 16368 tokens" in table
    assert "weights 3.00 GiB" in table
    assert "left               5.00 GiB" in table


def test_main_memory_is_measured() -> None:
    memory = measure(torch.device("cpu"))
    assert 0 < memory.free <= memory.total
