"""A slower tier below a small cache: takes what an order for it is told there, and checks its victims."""

from __future__ import annotations

from typing import Any

from costcache.eviction import Refused
from costcache.orders import VictimOrder
from costcache.policies.keyed import LRU
from costcache.pool import Pool
from costcache.radix.cache import PrefixCache
from costcache.records import NodeRecord, PoolState, RequestRecord, Victim

__all__ = ["check_slower_tier", "has_order_below"]

_TOKENS = 4000
_LRU = "LRU had to take over: the log of 'costcache' says why"


def has_order_below(cache: PrefixCache) -> bool:
    """Whether the order of a cache makes one for a slower tier."""
    return type(cache._pool.order).below is not VictimOrder.below


def check_slower_tier(cache: PrefixCache, *, flat: bool) -> None:
    """Copy what a cache has to a slower tier, and evict all of it there, by the order that the cache's makes.

    Args:
        cache: A cache in use.
        flat: Whether the tier's records are leaves, as under SGLang; or a tree, as in the tiers of costcache.

    Raises:
        AssertionError: An order had to be replaced, or named what it must not.
    """
    above = cache._pool
    pinned: set[int] = set()

    def take(victim: Victim, needed: int) -> int | Refused:
        record = victim.record
        if record.serial in pinned:
            return Refused.NOT_NOW
        if record.tokens > needed:
            tier.trim(record, needed)
            return needed
        tier.remove(record)
        return record.tokens

    def make_order(pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
        return above.order_below(pools[0]) or ("lru", LRU())

    tier = cache._tree.binding.pool(
        "host",
        take,
        capacity=_TOKENS,
        make_order=make_order,
        clock=cache.clock,
        flat=flat,
        lower_tier=True,
    )
    if above.fell_back:
        raise AssertionError(f"below was refused; {_LRU}")
    copies = _copied(above, tier, flat=flat)
    for number, copy in enumerate(copies):
        request = RequestRecord(cache.clock.begin(), cache.clock.in_seconds)
        if number % 3 == 0:
            tier.use([copy], request)
        elif number % 3 == 1:
            tier.inherit(copy, NodeRecord(0, None, copy.tokens, copy.depth))  # the device knows no more of it
        elif copy.tokens > 1:
            prefix = NodeRecord(0, None, 1, copy.depth)
            tier.split(prefix, copy, locked=True if flat else None)
            if flat:
                tier.unlock(prefix)  # as hosts do: now it is a leaf
    leaf = next((record for record in tier.records() if record.is_evictable), None)
    if leaf is not None:
        pinned.add(leaf.serial)
        tier.evict(1)
        pinned.clear()
        tier.pin(leaf)
        _evict_all(tier)
        tier.unpin(leaf)
    _evict_all(tier)
    if tier.live:
        raise AssertionError(f"{len(tier.live)} nodes are left in the slower tier: it named no victim")
    if above.fell_back:
        raise AssertionError(f"what a slower tier did broke the order above it; {_LRU}")


def _copied(above: Pool, tier: Pool, *, flat: bool) -> list[NodeRecord]:
    """Copy the records above, each with its history; of the first one as if that had been evicted."""
    copies: dict[int, NodeRecord] = {}
    for record in above.records():
        parent = None if flat or record.parent is None else copies.get(record.parent.serial)
        copy = NodeRecord(0, parent, record.tokens, record.depth)
        history: Any = record
        if not copies:
            history = NodeRecord(0, None, record.tokens, record.depth)
            history.inherit(record)
            tier.inherit(history, record)
        tier.insert(copy, history=history)
        copies[record.serial] = copy
    last = next(reversed(copies.values()), None)
    end = 0 if last is None else last.end
    tier.insert(NodeRecord(0, None if flat else last, 2, end))  # read from storage
    return list(copies.values())


def _evict_all(tier: Pool) -> None:
    evictable = tier.evictable
    freed = tier.evict(evictable).freed
    if tier.fell_back:
        raise AssertionError(f"in a slower tier, {_LRU}")
    if freed != evictable:
        raise AssertionError(f"in a slower tier, it freed {freed} tokens of {evictable}")
