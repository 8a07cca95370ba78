"""What a contract is about: something that a plugin offers by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from costcache.plugins import PluginManager

__all__ = ["Offered"]


class Offered:
    """Base of the contracts of what plugins offer by name.

    Attributes:
        plugin: The module or object that offers it; None if an installed entry point or costcache does.
        settings: Its settings, by name, where the defaults are not what is to be tested.
    """

    plugin: ClassVar[Any] = None
    settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    @functools.cache
    def plugins(cls) -> PluginManager:
        """The plugins that offer it: the one alone, or else all that are installed."""
        manager = PluginManager()
        if cls.plugin is None:
            manager.load_entry_points()
        else:
            manager.register(cls.plugin, "tested", getattr(cls.plugin, "__name__", "tested"))
        return manager
