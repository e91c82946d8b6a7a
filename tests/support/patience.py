"""How long a test waits for what must come."""

from typing import Final

PATIENCE: Final = 240.0
"""Seconds, more than anything takes on however busy a machine.

A test that shows that something happens at once lets what it must not wait for take ``FOR_EVER``.
"""

FOR_EVER: Final = 600.0
"""Seconds that no test waits for."""
