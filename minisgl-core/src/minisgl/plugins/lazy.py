"""Loads what a record names as ``"module:attribute"``."""

from importlib import import_module
from typing import Any

from minisgl.errors import PluginError
from minisgl.plugins.failure import describe_error


def load_object(path: str) -> Any:
    """Return the attribute that ``"module:attribute"`` names.

    Raises:
        PluginError: the module cannot be imported or has no such attribute.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{path!r} cannot be loaded: {describe_error(error)}.") from error
