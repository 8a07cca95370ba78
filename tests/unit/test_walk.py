"""A walk from an insert to a freed slot is short, and comes back to no module but those of the pool."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from types import FrameType
from typing import Any

import pytest

from costcache import RadixCache

pytestmark = pytest.mark.skipif(
    os.environ.get("COSTCACHE_TESTED") == "compiled", reason="compiled functions have no frames to look at"
)


def place(module: str) -> str:
    """Name what a reader opens: a module, or the pool, whose layers are one class after another."""
    return "pool" if module.startswith("pool.") else module


def chains_of(work: Any) -> set[tuple[str, ...]]:
    """Modules of costcache on the stack at each call, each chain without repeats in a row."""
    chains: set[tuple[str, ...]] = set()

    def look(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call":
            return
        modules = []
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name.startswith("costcache."):
                modules.append(place(name.removeprefix("costcache.")))
            frame = frame.f_back
        chains.add(tuple(name for name, _ in groupby(reversed(modules))))

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return chains


@pytest.mark.parametrize("policy", ["lru", "fifo", "hazard"])
def test_an_insert_that_evicts_passes_six_modules_at_most(policy: str) -> None:
    cache = RadixCache("llama-3-8b", 60, 1, policy)
    for number in range(3):
        cache.insert([number] * 20)
    chains = chains_of(lambda: cache.insert([9] * 30))
    assert cache.counters.victims > 1
    for chain in chains:
        again = [module for module in chain if chain.count(module) > 1]
        assert set(again) <= {"pool"}, " -> ".join(chain)
    order = "policies.hazard" if policy == "hazard" else "orders"
    walk = {
        module for chain in chains if "pool" in chain for module in chain if not module.startswith("policies")
    }
    assert {"radix.cache", "pool", "guard", "radix.tree"} <= walk
    assert any(module.startswith(order) for chain in chains for module in chain)
    # What is left out makes an object and returns: the result of the eviction, a request's record, a node.
    walk -= {"eviction", "records", "radix.node"}
    assert walk <= {"radix.cache", "pool", "guard", "orders", "radix.tree"}
    assert any(chain[-1:] == ("radix.slots",) for chain in chains), "the sixth: slots are freed by the cache"
