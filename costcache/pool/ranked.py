"""The order that ranks the records of a pool: what it is told, and what it is asked.

Each event comes after the records have been brought up to date, and goes to the order's handler, if it has
one. A handler that raises is dropped for LRU, which starts from the records. Only this package sends events
to an order.
"""

from __future__ import annotations

import contextlib
from typing import Any

from costcache.errors import PluginError
from costcache.eviction import EvictionCounters
from costcache.guard import OrderGuard
from costcache.orders import VictimOrder, overridden
from costcache.records import NodeRecord, RequestInfo, RequestRecord, Victim
from costcache.watch import Watch, is_ours

__all__ = ["RankedRecords", "checked_chance"]


class RankedRecords:
    """Records, and the order under guard that ranks them.

    Attributes:
        live: The records, by serial number, in order of creation.
        counters: Counts of the evictions.
    """

    __slots__ = (
        "_attach",
        "_consume",
        "_defer",
        "_detach",
        "_drops_slow",
        "_finish",
        "_guard",
        "_inherit",
        "_insert",
        "_merge",
        "_over_tier",
        "_refresh",
        "_remove",
        "_split",
        "_time_budget",
        "_touch",
        "_trim",
        "_unlock",
        "_use",
        "_watch",
        "counters",
        "live",
    )

    def __init__(self, counters: EvictionCounters, time_budget: float, drops_slow: bool) -> None:
        self.counters = counters
        self._time_budget = time_budget
        self._drops_slow = drops_slow
        self._watch: Watch | None = None
        self._over_tier = False
        self._guard: OrderGuard

    def _forget(self) -> None:
        self.live: dict[int, NodeRecord] = {}

    def records(self) -> list[NodeRecord]:
        """All records, in order of creation."""
        return list(self.live.values())

    # -- the order ---------------------------------------------------------------------------

    def rank_by(self, name: str, order: VictimOrder) -> None:
        """Evict by an order that was made elsewhere. The pool must be empty."""
        watch = None
        if not is_ours(order):
            watch = Watch(name, order, self._time_budget, self._drops_slow, self.counters)
            watch.seal()
        with contextlib.suppress(AttributeError):  # a class that takes none
            order._in_use = True
        self._guard = OrderGuard(name, order, self.records, self._listen, watch)
        self._listen(order)
        if self._over_tier:
            self._tell_over_tier()

    def _tell_over_tier(self) -> None:
        order: Any = self._guard.order
        try:
            order.over_tier()
        except BaseException as error:
            self._failed("over_tier", error)

    def _listen(self, order: VictimOrder) -> None:
        """Send events to ``order`` from now on: None marks those that it does not handle."""
        watch = self._watch = self._guard.watch
        handler_of = overridden if watch is None else watch.watched
        self._inherit: Any = handler_of(order, "inherit")
        self._insert: Any = handler_of(order, "insert")
        self._use: Any = handler_of(order, "use")
        self._touch: Any = handler_of(order, "touch")
        self._refresh: Any = handler_of(order, "refresh")
        self._split: Any = handler_of(order, "split")
        self._merge: Any = handler_of(order, "merge")
        self._trim: Any = handler_of(order, "trim")
        self._remove: Any = handler_of(order, "remove")
        self._unlock: Any = handler_of(order, "unlock")
        self._attach: Any = handler_of(order, "attach")
        self._detach: Any = handler_of(order, "detach")
        self._consume: Any = handler_of(order, "consume")
        self._finish: Any = handler_of(order, "finish")
        self._defer: Any = handler_of(order, "defer")

    def _failed(self, event: str, error: BaseException) -> None:
        """Drop the order, whose handler raised. The records are up to date, so LRU can start from them."""
        if isinstance(error, KeyboardInterrupt):  # the user's; a SystemExit is the plugin's
            raise error
        self._guard.drop(f"{event} raised", error)

    # -- requests ----------------------------------------------------------------------------

    @property
    def hears_finish(self) -> bool:
        """Whether the order wants to know how requests end; if not, :meth:`finish` need not be called."""
        return self._finish is not None

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """A request ended."""
        handler = self._finish
        if handler is not None:
            try:
                handler(request, info)
            except BaseException as error:
                self._failed("finish", error)

    # -- victims -----------------------------------------------------------------------------

    def _ask(
        self, pool: str, deferred: dict[int, Victim], short: int, locked: bool, states: bool
    ) -> Victim | None:
        """Ask the order for a victim until it names one that the host can be asked to free.

        Args:
            pool: Name of the pool that evicts.
            deferred: Victims of this eviction that could not be evicted, by serial number.
            short: Units that are missing still, all of them evictable; 0 if the host counts them.
            locked: Whether a victim turned out to be locked.
            states: Whether the pool is of the states at the ends of the records.

        Returns:
            None if no more can be evicted.
        """
        guard, live = self._guard, self.live
        checks = not short or self._watch is not None
        passed: set[int] | None = None
        while True:
            victim = guard.next_victim(pool)
            if victim is None:
                if guard.fallbacks:
                    return None
                if short:
                    missed = self._missed_a_node(deferred, locked)
                else:
                    missed = self._leaves_any(deferred, states)
                if not missed:
                    return None
                guard.drop(
                    f"it named no victim although {f'{short} more units' if short else 'more'} can be evicted"
                )
                continue
            record = victim.record
            if deferred and record.serial in deferred:
                if not guard.fallbacks:
                    guard.drop(f"it named node #{record.serial} again, which could not be evicted this time")
                elif passed is None:
                    passed = {record.serial}  # LRU does not know what was deferred before it took over
                elif record.serial in passed:
                    return None  # LRU, too, knows no others
                else:
                    passed.add(record.serial)
                continue
            if checks and live.get(record.serial) is not record:
                # A plugin may name a node of another cache, which the host could take for its own.
                if guard.fallbacks:
                    return None
                guard.drop(f"it named node #{record.serial}, which is not a leaf of this cache")
                continue
            return victim

    def _leaves_any(self, deferred: dict[int, Victim], states: bool) -> bool:
        """Whether a record that the order may name is left; looks at all of them."""
        if not states:
            return self._has_evictable(deferred)
        for record in self.live.values():
            state: Any = (
                record.state
            )  # a host's may count its locks itself, which compiled code would not see
            if state is not None and not state.locks and record.serial not in deferred:
                return True
        return False

    def _missed_a_node(self, deferred: dict[int, Victim], locked: bool) -> bool:
        """Whether an order that names no more victims has missed an evictable node."""
        if not deferred:
            return True  # evictable units are left, and no victim was deferred
        # Only an order that named locked nodes is suspect; then a scan of all nodes is worth its time.
        return locked and self._has_evictable(deferred)

    def _has_evictable(self, deferred: dict[int, Victim]) -> bool:
        return any(r.is_evictable and r.serial not in deferred for r in self.live.values())


def checked_chance(answer: Any) -> float | None:
    """An order's forecast, checked.

    Raises:
        PluginError: It is no chance.
    """
    if answer is not None and not 0.0 <= answer <= 1.0:
        raise PluginError(f"reuse_chance is {answer!r}: give a number from 0 to 1")
    return None if answer is None else float(answer)
