"""Each known fault is caught by the test that is named for it."""

import re
from pathlib import Path

import pytest

from mutations.run import HERE, ROOT, Mutation, MutationError, mutations, read, run, table

ALL = mutations()
EXAMPLE = (
    "tests/core/scheduler/test_early_aborts.py"
    "::test_an_abort_is_remembered_for_a_minute_and_taken_once"
)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ALL, ids=[one.name for one in ALL])
def test_the_fault_is_caught(mutation: Mutation) -> None:
    assert run(mutation).errors


def test_every_invariant_has_a_mutation() -> None:
    assert {one.invariant for one in ALL} == set(range(1, 23))


@pytest.mark.parametrize("mutation", ALL, ids=[one.name for one in ALL])
def test_the_named_test_exists_and_names_the_invariant(mutation: Mutation) -> None:
    file, *names = mutation.test.split("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    for name in names:
        assert re.search(rf"^\s*(def {name}\(|class {name}\b|{name} = )", source, re.MULTILINE)
    assert re.search(rf"invariant_?{mutation.invariant:02}", mutation.test, re.IGNORECASE)


def test_the_table_of_the_readme_is_that_of_the_files() -> None:
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    assert table(ALL) in readme, "write it anew: python tests/mutations/run.py --table"


def written(folder: Path, old: str, new: str) -> Mutation:
    path = folder / "one.patch"
    path.write_text(
        f"Invariant: 1\nFault: an example\nTest: {EXAMPLE}\n\n"
        "--- a/minisgl-core/src/minisgl/scheduler/early_aborts.py\n"
        "+++ b/minisgl-core/src/minisgl/scheduler/early_aborts.py\n"
        f"@@ -2,3 +2,3 @@\n \n-{old}\n+{new}\n \n",
        encoding="utf-8",
    )
    return read(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import time", "import time  # harmless", "survives"),
        ("import time", "import no_such_module", "could not run the test"),
        ("import times", "import time", "does not apply"),
    ],
)
@pytest.mark.slow
def test_what_proves_nothing_is_an_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(MutationError, match=message):
        run(written(tmp_path, old, new))
