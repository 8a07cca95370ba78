"""Tiers of memory below the device: what is worth copying down, keeping there, and loading back.

``links`` and ``writing`` are the decisions, apart from any memory: the simulator and the adapters make them
alike. :class:`TieredCache` makes them over real memory: the generic cache of the device, host memory and
storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache._lazy import lazily
from costcache.tiers.links import Link
from costcache.tiers.writing import WRITINGS, Move, Price, Writing, make_writing

if TYPE_CHECKING:
    from costcache.tiers.buffers import Buffers
    from costcache.tiers.cache import TieredCache, TieredMatch
    from costcache.tiers.counters import TierCounters
    from costcache.tiers.layout import Layout, Part
    from costcache.tiers.ranks import GroupRanks, Ranks
    from costcache.tiers.settings import TierSettings
    from costcache.tiers.up import Load

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
    "Load": "up",
    "Part": "layout",
    "Ranks": "ranks",
    "TierCounters": "counters",
    "TierSettings": "settings",
    "TieredCache": "cache",
    "TieredMatch": "cache",
}
"""Names that need arrays, imported on first use: who decides alone needs none."""

__getattr__ = lazily(__name__, _MODULES)
