"""Tiers of memory below the device: what is worth copying down, keeping there, and loading back.

The decisions, apart from any memory: the simulator and the adapters make them alike.
"""

from __future__ import annotations

from costcache.tiers.links import Link
from costcache.tiers.writing import WRITINGS, Move, Writing, make_writing

__all__ = ["WRITINGS", "Link", "Move", "Writing", "make_writing"]
