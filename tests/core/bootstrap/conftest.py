"""Makes ``plugin_site`` known to the tests of this folder."""

from support.plugin_site import plugin_site

__all__ = ["plugin_site"]
