"""Greedy-Dual-Size-Frequency: evicts nodes that are cheap to recompute, large and seldom used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

if TYPE_CHECKING:
    from costcache.cost import CostModel

__all__ = ["GDSF"]


class GDSF(KeyedOrder):
    """Evicts the leaf with the lowest ``L + uses * cost / size``.

    L is the inflation: the rank of the last victim. A node takes the value of L at its last touch, so that
    the rank of unused nodes falls below the others'. Cost is the FLOPs to recompute the node, which grow with
    its depth, and size its tokens. Ties are broken by LRU.

    Source: L. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
    policy", HP Laboratories report HPL-98-69R1, 1998. No parameters.

    Departures: objects are nodes, of which only unlocked leaves are evicted and whose size changes when they
    are split or trimmed (the rank changes with it); a victim that is only trimmed raises L too; an inner
    node that becomes a leaf may rank below L, and then L stays as it is.
    """

    def __init__(self, cost: CostModel) -> None:
        super().__init__()
        self._flops = cost.recompute_flops
        self._inflation = 0.0
        self._at_touch: dict[int, float] = {}

    def key(self, record: NodeRecord) -> tuple[float, int]:
        depth, tokens = record.depth, record.tokens
        worth = record.uses * self._flops(depth, depth + tokens) / tokens
        return (self._at_touch[record.serial] + worth, record.recency)

    def insert(self, record: NodeRecord) -> None:
        self._at_touch[record.serial] = self._inflation
        super().insert(record)

    def touch(self, record: NodeRecord) -> None:
        self._at_touch[record.serial] = self._inflation

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self._at_touch[prefix.serial] = self._at_touch[tail.serial]
        super().split(prefix, tail)

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        del self._at_touch[prefix.serial]
        self.merged(prefix, tail)

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._inflate(record)
        super().trim(record, tokens)

    def remove(self, record: NodeRecord) -> None:
        self._inflate(record)
        super().remove(record)
        del self._at_touch[record.serial]

    def _inflate(self, record: NodeRecord) -> None:
        if record is self._named:  # its key is the one it was named by
            self._inflation = max(self._inflation, record.queued[0])


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "gdsf": PolicySpec(
            lambda cost, pools, settings: GDSF(cost),
            "Fewest FLOPs saved per token, with ageing.",
        )
    }
