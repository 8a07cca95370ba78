"""Replay of a trace over tiers of memory: a device, its host's memory, and a disk.

Prompts alone are cached. Each tier is a :class:`~costcache.pool.Pool` of extents with an order of its own; an
extent may be in several.

The way of a request through the modules: ``server`` has the queue and the requests that run; ``reloads``
finds what a request uses, and loads what is below; ``device`` caches its prompt, and evicts; ``demotion``
decides what of that which leaves a tier is written to the next one, by the facts of ``moves``; ``lower`` are
the tiers below the device, and ``links`` what connects them. A ``tier`` holds ``extents``; ``doubles`` are
those on the device and in host memory too. All go by the server's ``times``, and give the ``outcome``.
"""

from __future__ import annotations

from costcache.sim.tiers.lower import Below
from costcache.sim.tiers.outcome import Moved, TieredOutcome
from costcache.sim.tiers.server import TieredServer

__all__ = ["Below", "Moved", "TieredOutcome", "TieredServer"]
