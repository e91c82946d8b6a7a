"""Lets Triton's interpreter loop, and makes the site of throw-away plugins known."""

from support.interpreter import loops_to_loaded_numbers
from support.plugin_site import plugin_site

__all__ = ["loops_to_loaded_numbers", "plugin_site"]
