"""Orders for sliding-window KV, whose records are leaves at any depth.

A walk uses several records of one path at once, and a policy with a key alone cannot tell them apart. The one
that ends first is evicted first, as in SGLang's list: a match needs the window before its end, and what lies
before that window only for prompts that branch there.
"""

from __future__ import annotations

from typing import Any

from costcache.orders import KeyedOrder, VictimOrder
from costcache.records import NodeRecord

__all__ = ["EarliestFirst", "make_window_order"]


class EarliestFirst(KeyedOrder):
    """Breaks the ties of another order's key by the end of the record.

    Attributes:
        keyed: The order whose key it is.
    """

    def __init__(self, keyed: KeyedOrder) -> None:
        super().__init__()
        self.keyed = keyed
        self._key_of = keyed.key

    def key(self, record: NodeRecord) -> tuple[Any, int]:
        return (self._key_of(record), record.depth + record.tokens)


class _EarliestFirstAnew(EarliestFirst):
    """The same for a key that a touch may lower."""

    rises = False


def make_window_order(order: VictimOrder, *, leaves_only: bool) -> VictimOrder:
    """Make an order for windows of a policy's own order.

    Args:
        order: A new order of the policy.
        leaves_only: Whether it is a key of unlocked leaves and nothing else
            (:attr:`costcache.policies.spec.PolicySpec.leaves_only`); other orders are unchanged.
    """
    if not leaves_only or not isinstance(order, KeyedOrder):
        return order
    return EarliestFirst(order) if order.rises else _EarliestFirstAnew(order)
