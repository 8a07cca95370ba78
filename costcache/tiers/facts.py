"""What the policy of writing is told of a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.tiers.writing import Move, Price

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costcache.cost import CostModel
    from costcache.pool import Pool
    from costcache.radix.node import Node
    from costcache.tiers.layout import Layout
    from costcache.tiers.line import Line
    from costcache.tiers.lower import LowerTier
    from costcache.tiers.tier import Tier

__all__ = ["Facts"]


class Facts:
    """The facts of copies: bytes, seconds, the device's forecast, and what room in a tier costs.

    Attributes:
        cost: The cost model.
    """

    def __init__(self, cost: CostModel, layout: Layout, pool: Pool) -> None:
        """Take the costs, the layout of the memory, and the device's pool, whose order forecasts."""
        self.cost = cost
        self._layout = layout
        self._pool = pool
        self._prices = {"host": Price(), "disk": Price()}

    def of(self, source: Tier, node: Node, start: int, target: LowerTier, lines: Sequence[Line]) -> Move:
        """The facts of the part of a node from token ``start`` on, with its ending if it has one.

        Args:
            source: The tier that the node is of.
            node: The node.
            start: First token.
            target: The slower tier.
            lines: The links back to the device, that of the target first.
        """
        tokens = node.end - start
        size = tokens * self._layout.token_bytes
        first, rows = start, 0
        if source.needs_ending and source.ends(node):
            rows = source.ending_rows(node.end)
            size += rows * (self._layout.state_bytes or self._layout.window_bytes)
            above = node.parent
            first = 0 if above is None else source.usable(above).end
        missing = target.missing_bytes(tokens, rows)
        knows = source.forecaster(self._pool)
        return Move(
            tokens=tokens,
            size=size,
            uses=node.uses,
            recompute=self.cost.recompute_seconds(min(first, start), node.end),
            reload=sum(line.link.seconds(size, 0.0) for line in lines),
            chance=knows.reuse_chance(node),
            write=size / lines[0].link.bytes_per_second,
            displaced=self._prices[target.name].displaced(missing, knows.order),
        )

    def lost(self, tier: LowerTier, move: Move) -> None:
        """A tier is about to evict what these are the facts of, or has refused it."""
        pool = tier.pool
        self._prices[tier.name].lost(
            move, pool.capacity * self._layout.token_bytes / max(1, pool.token_units)
        )
