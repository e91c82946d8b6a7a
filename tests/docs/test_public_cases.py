"""Each case from public bug reports of such servers has a test that names it."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = (
    *(1, 2, 7, 8, 10, 11, 14, 16, 17, 19, 20, 21, 23, 25, 27, 30, 31, 33, 37, 38, 39, 40, 42, 43),
    *(45, 47, 48, 49, 51, 61, 64, 68, 72, 73, 74, 76, 80, 83, 84, 86, 87, 88, 92, 95, 97, 98, 100),
    *(103, 110, 113, 115, 118, 119, 121, 130, 131, 132, 137),
)


def test_every_public_case_has_a_test() -> None:
    named: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        if path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            named |= {int(number) for number in re.findall(r"(?:\bR|_r)(\d{2,3})(?![0-9])", text)}
    assert sorted(set(CASES) - named) == []
