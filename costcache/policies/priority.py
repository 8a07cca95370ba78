"""The requests' own priorities."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["Priority"]


class Priority(KeyedOrder):
    """The leaf with the lowest priority goes first; among equals, the least recently used.

    A node has the highest priority of the requests that inserted it.
    """

    def key(self, record: NodeRecord) -> tuple[int, int]:
        return (record.priority, record.recency)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "priority": PolicySpec(
            lambda cost, pools, settings: Priority(),
            "Lowest request priority first; ties least recent first.",
        )
    }
