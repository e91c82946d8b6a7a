"""Makes the site of throw-away FlashAttentions known to the tests of this folder."""

import pytest

from support.flash_attn_site import FlashAttnSite
from support.kernel_objects import KernelObjects, compile_objects
from support.plugin_site import plugin_site

__all__ = ["flash_attn_site", "plugin_site"]


@pytest.fixture
def flash_attn_site(tmp_path, monkeypatch) -> FlashAttnSite:
    return FlashAttnSite(tmp_path / "kernels", monkeypatch)


@pytest.fixture(scope="session")
def kernel_objects(tmp_path_factory) -> KernelObjects:
    return compile_objects(tmp_path_factory.mktemp("kernel-objects"))


@pytest.fixture(autouse=True)
def _cache_of_a_test(monkeypatch, tmp_path):
    """Kernels would be kept in the user's cache folder; what is set there is forgotten again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("ENABLED", "DIR"):
        monkeypatch.setenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", "")
        monkeypatch.delenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}")
