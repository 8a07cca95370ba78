"""Errors that users see. Each message names the wrong field, its value and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ConfigError",
    "CostcacheError",
    "PluginError",
    "SettingsError",
    "TraceError",
    "one_line",
    "reason",
]


class CostcacheError(Exception):
    """Base class of the errors that costcache raises on purpose."""


class ConfigError(CostcacheError, ValueError):
    """A model's ``config.json`` cannot be read; names the file, the field and the fix."""


class SettingsError(CostcacheError, ValueError):
    """A setting is wrong; names the field, the value and the fix."""


class PluginError(CostcacheError, RuntimeError):
    """No plugin, or more than one, claims a model or offers a policy name; or a plugin fails."""


class TraceError(CostcacheError, ValueError):
    """A trace file is malformed; names the file, the line and the field."""


def one_line(error: BaseException) -> str:
    """An error's type and message in one line, whatever its own code does."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reason(item: Mapping[str, Any]) -> str:
    """Return pydantic's message for one problem, worded to end a sentence of ours."""
    message = str(item["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
