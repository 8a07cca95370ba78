"""Least recently used: the baseline of every comparison."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["LRU"]


class LRU(KeyedOrder):
    """The leaf that was touched longest ago goes first."""

    def key(self, record: NodeRecord) -> int:
        return record.recency


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {"lru": PolicySpec(lambda cost, pools, settings: LRU(), "Least recently used first.")}
