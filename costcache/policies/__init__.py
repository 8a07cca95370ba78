"""Built-in eviction policies, one a file; each is an ordinary policy plugin."""

from __future__ import annotations

from costcache.policies.spec import NoSettings, PolicySpec, supports_every_model

__all__ = ["BUILTIN", "FOR_STATES", "NoSettings", "PolicySpec", "supports_every_model"]

BUILTIN = (
    "fifo",
    "filo",
    "gdsf",
    "hazard",
    "hits-per-token",
    "lfu",
    "lhd",
    "lru",
    "lru2",
    "mru",
    "priority",
    "s3fifo",
    "sieve",
    "slru",
    "tlru",
    "wild",
    "wtinylfu",
)
"""Policies of this package, each in the module of its name, with ``_`` for ``-``."""

FOR_STATES = ("consumed-lru", "marconi")
"""More of them, which serve models with states only."""
