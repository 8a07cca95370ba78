"""A policy in about 20 lines: it first evicts the nodes that are cheapest to recompute."""

from __future__ import annotations

from pydantic import BaseModel, Field

from costcache.cost import CostModel
from costcache.orders import KeyedOrder
from costcache.records import NodeRecord

__all__ = ["Worth", "WorthSettings"]


class WorthSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of ``worth``, on the command line as ``--set worth.most_uses=4``."""

    most_uses: int = Field(
        8, ge=1, description="Uses beyond this many do not count, so that hot nodes can cool."
    )


class Worth(KeyedOrder):
    """Evicts the leaf with the fewest uses times FLOPs per token; ties are broken by LRU."""

    def __init__(self, cost: CostModel, settings: WorthSettings) -> None:
        super().__init__()
        self._cost, self._most_uses = cost, settings.most_uses

    def key(self, record: NodeRecord) -> tuple[float, int]:
        """Rank of a leaf. A touch only raises it, as ``KeyedOrder.rises`` promises by default."""
        flops = self._cost.recompute_flops(record.depth, record.end) / record.tokens
        return (min(record.uses, self._most_uses) * flops, record.recency)
