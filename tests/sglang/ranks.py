"""The victims of one stream of random operations."""

from __future__ import annotations

from typing import Any

STEPS = 250


def victims(shape: Any, seed: int, policy: str) -> list[Any]:
    """Every victim of a stream: pool, node, place, tokens, uses, recency, what was needed, what it gave."""
    from tests.sglang.fuzz import Fuzz
    from tests.sglang.pools import cost_cache
    from tests.sglang.serving import Server

    fuzz = Fuzz(Server(cost_cache(shape, policy=policy), shape), seed)
    seen: list[Any] = []
    for pool in fuzz.server.cache.pools.by_name.values():
        pool.take = recorded(pool.name, pool.take, seen)
    for _ in range(STEPS):
        fuzz.step()
    fuzz.end()
    return seen


def recorded(pool: str, take: Any, seen: list[Any]) -> Any:
    """Wrap a pool's ``take`` to write down each victim and the answer."""

    def recorded_take(victim: Any, needed: int) -> Any:
        record = victim.record
        asked = [pool, record.serial, record.depth, record.tokens, record.uses, record.recency, needed]
        taken = take(victim, needed)
        seen.append([*asked, taken if isinstance(taken, int) else taken.value])
        return taken

    return recorded_take
