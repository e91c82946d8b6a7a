"""The composition root: from settings and plugins to an engine and a scheduler.

The one place that knows all parts. ``server`` calls it in the scheduler's process, ``llm`` in its
own; nothing below imports it.
"""

from minisgl.bootstrap.scheduler import build_scheduler, load_host
from minisgl.bootstrap.survey import resolve_device, resolve_dtype

__all__ = ["build_scheduler", "load_host", "resolve_device", "resolve_dtype"]
