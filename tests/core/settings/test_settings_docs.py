"""docs/settings.md says what the settings model says."""

import re
from pathlib import Path

import pytest

from minisgl.settings import resolve_settings
from minisgl.settings.model import Settings
from support import settings_docs

TEXT = settings_docs.DOCUMENT.read_text()


@pytest.mark.parametrize("section", settings_docs.sections())
def test_every_setting_has_its_line(section):
    expected = settings_docs.rows(section)
    assert expected
    found = [line + "\n" for line in TEXT.splitlines() if line.startswith(f"| `{section}.")]
    assert found == expected, "run: PYTHONPATH=tests python -m support.settings_docs"


def test_every_section_has_its_heading():
    headings = re.findall(r"^### `(\w+)`", TEXT, re.MULTILINE)
    assert headings == list(Settings.model_fields)


def test_the_example_files_are_valid(tmp_path: Path):
    blocks = re.findall(r"```(toml|yaml|json)\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) >= 2
    for suffix, block in blocks:
        path = tmp_path / f"server.{suffix}"
        path.write_text(block)
        resolved = resolve_settings(flags={}, config=path, environ={})
        assert f"file {path}" in resolved.sources.values()
