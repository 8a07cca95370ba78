"""Keeps a policy from hurting the cache: an order that raises is dropped for LRU."""

from __future__ import annotations

import logging
import operator
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

from costcache.orders import VictimOrder, overridden
from costcache.policies.keyed import LRU
from costcache.records import Action, NodeRecord, Victim

__all__ = ["OrderGuard"]

logger = logging.getLogger("costcache")

EVENTS = (
    "insert",
    "use",
    "touch",
    "refresh",
    "split",
    "trim",
    "remove",
    "lock",
    "unlock",
    "attach",
    "detach",
    "consume",
    "finish",
    "defer",
)


_OF_TWO = frozenset({"split", "trim", "finish"})
"""Events that tell of two things. Calls with ``*`` would cost as much as a short handler."""


class OrderGuard:
    """One order's event handlers, each None where the order does not listen.

    A handler that raises, or an order that is reported by :meth:`drop`, is replaced by LRU, made
    from the records that the cache holds, until the cache is reset. Since every rank feeds
    its order the same events, every rank drops it at the same point.

    Attributes:
        name: Name of the policy in force; ``"lru"`` after a fallback.
        order: The order in force.
        fallbacks: How often an order was dropped: 0 or 1.
        records: Gives the records of the nodes that the cache holds, in order of creation.
        fallback: Makes the LRU order that takes over.
    """

    __slots__ = (*EVENTS, "fallback", "fallbacks", "name", "order", "records")

    insert: Callable[..., None] | None
    use: Callable[..., None] | None
    touch: Callable[..., None] | None
    refresh: Callable[..., None] | None
    split: Callable[..., None] | None
    trim: Callable[..., None] | None
    remove: Callable[..., None] | None
    lock: Callable[..., None] | None
    unlock: Callable[..., None] | None
    attach: Callable[..., None] | None
    detach: Callable[..., None] | None
    consume: Callable[..., None] | None
    finish: Callable[..., None] | None
    defer: Callable[..., None] | None

    def __init__(
        self,
        name: str,
        order: VictimOrder,
        records: Callable[[], Iterable[NodeRecord]],
        fallback: Callable[[], VictimOrder] = LRU,
    ) -> None:
        """Guard ``order``.

        Args:
            name: The policy's name, for messages.
            order: The order.
            records: Gives the records of the nodes that the cache holds, in order of creation.
            fallback: Makes the LRU order that takes over.
        """
        self.fallback = fallback
        self.name = name
        self.order = order
        self.fallbacks = 0
        self.records = records
        for event in EVENTS:
            handler = overridden(order, event)
            setattr(self, event, handler and self._guarded(event, handler))

    @property
    def fell_back(self) -> bool:
        """True once the order has been dropped for LRU."""
        return self.fallbacks > 0

    def next_victim(self, pool: str) -> Victim | None:
        """Ask the order; an order that raises or answers nonsense is dropped and LRU is asked."""
        if not self.fallbacks:
            try:
                answer: Any = self.order.next_victim(pool)
                if answer is None:
                    return None
                if isinstance(answer, Victim):
                    fields: tuple[Any, ...] = answer
                    record, action, tokens = fields
                    if isinstance(record, NodeRecord) and isinstance(action, Action):
                        if tokens is None or type(tokens) is int:
                            return answer
                        if not isinstance(tokens, bool) and hasattr(tokens, "__index__"):  # numpy's integers
                            return answer._replace(tokens=operator.index(tokens))
                self.drop(
                    f"next_victim returned {reprlib.repr(answer)}, not the Victim of a record "
                    "with an Action and, as its tokens, an int or None"
                )
            except Exception as error:
                self.drop("next_victim raised", error)
        return self.order.next_victim(pool)

    def drop(self, why: str, error: Exception | None = None) -> None:
        """Replace the order by LRU; logged once, with the traceback where there is one."""
        logger.error(
            "policy %r is dropped for 'lru' until the cache is reset: %s",
            self.name,
            why,
            exc_info=error,
        )
        self.fallbacks += 1
        self.name = "lru"
        self.order = self.fallback()
        for event in EVENTS:
            setattr(self, event, overridden(self.order, event))
        self.order.load(self.records())

    def _guarded(self, event: str, handler: Callable[..., None]) -> Callable[..., None]:
        def call(record: Any) -> None:
            if self.fallbacks:
                return  # from a walk that began before the fallback: record.data is LRU's now
            try:
                handler(record)
            except Exception as error:
                # The cache is consistent before every event, so LRU can start from its records;
                # they include what this event told.
                self.drop(f"{event} raised", error)

        def call_with_two(first: Any, second: Any) -> None:
            if self.fallbacks:
                return
            try:
                handler(first, second)
            except Exception as error:
                self.drop(f"{event} raised", error)

        return call_with_two if event in _OF_TWO else call
