"""Least frequently used."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["LFU"]


class LFU(KeyedOrder):
    """The leaf that the fewest requests used goes first; among equals, the least recently used."""

    def key(self, record: NodeRecord) -> tuple[int, int]:
        return (record.uses, record.recency)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "lfu": PolicySpec(
            lambda cost, pools, settings: LFU(),
            "Used by the fewest requests first; ties least recent first.",
        )
    }
