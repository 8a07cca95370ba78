"""Most recently used."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["MRU"]


class MRU(KeyedOrder):
    """The leaf that was touched last goes first: of use where the stream cycles through more than fits."""

    rises = False

    def key(self, record: NodeRecord) -> int:
        return -record.recency


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "mru": PolicySpec(
            lambda cost, pools, settings: MRU(),
            "Most recently used first: for streams that cycle through more than fits.",
        )
    }
