"""Built-in eviction policies, offered together as the plugin ``builtin``.

Those that are a single key are in ``keyed``; every other module holds one policy, or what several share.
"""

from __future__ import annotations

import importlib

from costcache.hookspecs import hookimpl
from costcache.policies.spec import NoSettings, PolicySpec, supports_every_model

__all__ = ["BUILTIN", "NoSettings", "PolicySpec", "policies", "supports_every_model"]

BUILTIN = (
    "arc",
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
"""Names of the built-in policies that serve models without states."""

_MODULES = (
    "arc",
    "gdsf",
    "hazard",
    "keyed",
    "lhd",
    "lru2",
    "marconi",
    "s3fifo",
    "sieve",
    "states",
    "tlru",
    "wild",
    "wtinylfu",
)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    """Offer every built-in policy."""
    offers: dict[str, PolicySpec] = {}
    for module in _MODULES:
        offers |= importlib.import_module(f"{__name__}.{module}").policies()
    return offers
