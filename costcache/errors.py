"""Errors that users see. Each message names what is wrong, the value, and what to do."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CostcacheError",
    "PluginError",
    "SettingsError",
    "TraceError",
]


class CostcacheError(Exception):
    """Base class of every error that costcache raises on purpose."""


class ConfigError(CostcacheError, ValueError):
    """A model's ``config.json`` cannot be read: names the file, the field and the fix."""


class SettingsError(CostcacheError, ValueError):
    """A setting is wrong: names the field, the value and the fix."""


class PluginError(CostcacheError, RuntimeError):
    """No plugin, or more than one, answers for a model or a policy name."""


class TraceError(CostcacheError, ValueError):
    """A trace file is malformed: names the file, the line and the field."""
