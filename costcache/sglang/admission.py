"""What SGLang's host tier copies and loads back, by cost: the rule ``by_cost`` over SGLang's write policies.

SGLang decides when it asks: at an insert (write-through), or when a leaf is evicted (write-back). The rule
says yes or no to each copy and each load, from the model's costs and the forecast of the device's policy. Its
speeds are those of the settings and no measured ones, since all ranks must decide alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.tiers.writing import ByCost, Move, Price

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.records import NodeRecord
    from costcache.sglang.pools import Pools

__all__ = ["Admission"]


class Admission:
    """Says of each node whether a copy on the host, or a load from there, is worth it.

    Attributes:
        refused: Copies, and loads, that were refused.
    """

    def __init__(self, cost: CostModel, pools: Pools) -> None:
        """Decide by the costs of a model, and by the forecast of the pool ``kv``."""
        self._cost = cost
        self._pools = pools
        self._rule = ByCost()
        self._price = Price()
        self.refused = {"copies": 0, "loads": 0}

    def copies(self, record: NodeRecord, depth: int, tokens: int, states: int, *, free: int) -> bool:
        """Whether to copy a node to the host.

        Args:
            record: Its record in the pool ``kv``; of the tail of a trimmed leaf, that of the rest.
            depth: Tokens before it.
            tokens: Its tokens.
            states: States at its end that would be copied along.
            free: Free tokens on the host; what does not fit displaces others.
        """
        missing = self._cost.reload_bytes(max(0, tokens - free))
        displaced = self._price.displaced(missing, self._pools.kv.order)
        move = self._move(record, depth, tokens, states, displaced)
        worth = self._rule.copies(move)
        if not worth:
            self.refused["copies"] += 1
            self._lost(move)
        return worth

    def loads(self, depth: int, tokens: int, states: int) -> bool:
        """Whether to load so many tokens after ``depth``, and states, from the host."""
        cost = self._cost
        move = Move(
            tokens,
            int(cost.reload_bytes(tokens, states)),
            1,
            # A state alone saves computing all before it.
            cost.recompute_seconds(depth if tokens else 0, depth + tokens),
            cost.reload_seconds(tokens, states=states),
        )
        worth = self._rule.loads(move)
        self.refused["loads"] += not worth
        return worth

    def evicted(self, record: NodeRecord, tokens: int) -> None:
        """So many tokens of a node are evicted on the host: that is what a copy displaces."""
        self._lost(self._move(record, record.end - tokens, tokens, 0, 0.0))

    def _lost(self, move: Move) -> None:
        self._price.lost(move, self._cost.reload_bytes(self._pools.by_name["host"].state().capacity))

    def _move(self, record: NodeRecord, depth: int, tokens: int, states: int, displaced: float) -> Move:
        cost = self._cost
        return Move(
            tokens,
            int(cost.reload_bytes(tokens, states)),
            record.uses,
            cost.recompute_seconds(depth, depth + tokens),
            cost.reload_seconds(tokens, states=states),
            self._pools.kv.reuse_chance(record),
            displaced=displaced,
        )
