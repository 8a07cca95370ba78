"""Built-in eviction policies, one a file; each is an ordinary policy plugin."""

from __future__ import annotations

from costcache.policies.spec import NoSettings, PolicySpec, supports_every_model

__all__ = ["BUILTIN", "NoSettings", "PolicySpec", "supports_every_model"]

BUILTIN = ("fifo", "filo", "lfu", "lru", "mru", "priority", "slru", "tlru")
"""Modules of this package that offer policies."""
