"""A clean process for each command; plugins to install."""

from support.clean_process import clean_process
from support.plugin_site import plugin_site

__all__ = ["clean_process", "plugin_site"]
