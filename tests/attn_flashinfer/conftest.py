"""Makes the sites of throw-away distributions known to the tests of this folder."""

import sys
from collections.abc import Iterator

import pytest

from support.flashinfer_site import FlashInferSite
from support.plugin_site import plugin_site

__all__ = ["flashinfer_site", "plugin_site"]


@pytest.fixture
def flashinfer_site(tmp_path, monkeypatch) -> Iterator[FlashInferSite]:
    yield FlashInferSite(tmp_path / "site", monkeypatch)
    sys.modules.pop("flashinfer_jit_cache", None)
