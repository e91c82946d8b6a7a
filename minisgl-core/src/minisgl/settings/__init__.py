"""Settings: one frozen model, and the sources that fill it.

Only ``resolve_settings`` and ``settings_from_keywords`` read the environment; worker processes
receive a pickled ``Settings``.
"""

from minisgl.settings.logs import configure_logging
from minisgl.settings.model import (
    AttentionSettings,
    CacheSettings,
    EngineSettings,
    LogSettings,
    ModelSettings,
    MoeSettings,
    ParallelSettings,
    PluginSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
)
from minisgl.settings.resolve import (
    ResolvedSettings,
    json_schema,
    resolve_settings,
    settings_from_keywords,
)

__all__ = [
    "AttentionSettings",
    "CacheSettings",
    "EngineSettings",
    "LogSettings",
    "ModelSettings",
    "MoeSettings",
    "ParallelSettings",
    "PluginSettings",
    "ResolvedSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "configure_logging",
    "json_schema",
    "resolve_settings",
    "settings_from_keywords",
]
