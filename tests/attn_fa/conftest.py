"""Makes the site of throw-away FlashAttentions known to the tests of this folder."""

import pytest

from support.flash_attn_site import FlashAttnSite
from support.plugin_site import plugin_site

__all__ = ["flash_attn_site", "plugin_site"]


@pytest.fixture
def flash_attn_site(tmp_path, monkeypatch) -> FlashAttnSite:
    return FlashAttnSite(tmp_path / "kernels", monkeypatch)
