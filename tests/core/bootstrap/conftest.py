"""Makes ``plugin_site`` known to the tests of this folder, some of which run commands."""

from support.clean_process import clean_process
from support.plugin_site import plugin_site

__all__ = ["clean_process", "plugin_site"]
