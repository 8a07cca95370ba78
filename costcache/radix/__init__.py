"""The generic radix cache: tree, slot pool, locks, pages, namespaces and events."""

from __future__ import annotations

from costcache.radix.cache import RadixCache
from costcache.radix.events import Cleared, Event, Removed, Stored
from costcache.radix.node import Node
from costcache.radix.results import CacheStats, Inserted, Match
from costcache.radix.statecache import StateCache, StateMatch

__all__ = [
    "CacheStats",
    "Cleared",
    "Event",
    "Inserted",
    "Match",
    "Node",
    "RadixCache",
    "Removed",
    "StateCache",
    "StateMatch",
    "Stored",
]
