"""Tiers of memory below the device: what is worth copying down, keeping there, and loading back.

``links`` and ``writing`` are the decisions, apart from any memory: the simulator and the adapters make them
alike. :class:`TieredCache` makes them over real memory: the generic cache of the device, host memory and
storage.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from costcache.tiers.links import Link
from costcache.tiers.writing import WRITINGS, Move, Price, Writing, make_writing

if TYPE_CHECKING:
    from costcache.tiers.buffers import Buffers
    from costcache.tiers.cache import TieredCache, TieredMatch
    from costcache.tiers.layout import Layout, Part
    from costcache.tiers.moving import Load, TierCounters
    from costcache.tiers.ranks import GroupRanks, Ranks
    from costcache.tiers.settings import TierSettings

__all__ = [
    "WRITINGS",
    "Buffers",
    "GroupRanks",
    "Layout",
    "Link",
    "Load",
    "Move",
    "Part",
    "Price",
    "Ranks",
    "TierCounters",
    "TierSettings",
    "TieredCache",
    "TieredMatch",
    "Writing",
    "make_writing",
]

_MODULES = {
    "Buffers": "buffers",
    "GroupRanks": "ranks",
    "Layout": "layout",
    "Load": "moving",
    "Part": "layout",
    "Ranks": "ranks",
    "TierCounters": "moving",
    "TierSettings": "settings",
    "TieredCache": "cache",
    "TieredMatch": "cache",
}
"""Names that need arrays, imported on first use: who decides alone needs none."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value
