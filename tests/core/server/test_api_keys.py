"""Where keys come from, and which ones no request could carry."""

from pathlib import Path

import pytest

from minisgl.errors import SettingsError
from minisgl.server.api_keys import read_api_keys
from minisgl.settings import ServerSettings


def test_keys_come_from_settings_and_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nalpha\n\n  beta  \r\n")
    assert read_api_keys(ServerSettings()) == []
    assert read_api_keys(ServerSettings(api_key="one,two")) == ["one", "two"]
    both = ServerSettings(api_key=("one",), api_key_file=path)
    assert read_api_keys(both) == ["one", "alpha", "beta"]


@pytest.mark.parametrize("content", [None, b"", b"# only this\n\n", b"\xff\xfe"])
def test_a_file_without_keys_never_means_that_none_is_needed(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"api_key_file=.*keys"):
        read_api_keys(ServerSettings(api_key=("one",), api_key_file=path))


@pytest.mark.parametrize("key", ["with space", "ümlaut", "tab\tbed", "\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"good\n{key}\n")
    with pytest.raises(SettingsError, match="key 2 of") as caught:
        read_api_keys(ServerSettings(api_key_file=path))
    assert key not in str(caught.value)
