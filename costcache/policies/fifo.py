"""First in, first out."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["FIFO"]


class FIFO(KeyedOrder):
    """The leaf that was made first goes first, however often it was used since."""

    def key(self, record: NodeRecord) -> int:
        return record.created


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {"fifo": PolicySpec(lambda cost, pools, settings: FIFO(), "Oldest first, however often used.")}
