"""First in, last out."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["FILO"]


class FILO(KeyedOrder):
    """The leaf that was made last goes first."""

    def key(self, record: NodeRecord) -> int:
        return -record.created


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {"filo": PolicySpec(lambda cost, pools, settings: FILO(), "Newest first, however often used.")}
