"""Orders for models with states, which name the next checkpoint or leaf to evict.

A state is evicted by its own rank: alone from a node with children, which becomes a tombstone, and together
with its node from a leaf, since KV after the last state is dead. Leaves without a state are evicted first.
"""

from __future__ import annotations

import heapq
from typing import Any

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder, VictimOrder, adds_nothing_per_node, check_key, no_rank
from costcache.policies.keyed import LRU
from costcache.policies.spec import PolicySpec
from costcache.records import Action, NodeRecord, RequestInfo, RequestRecord, Victim

__all__ = ["ConsumedLRU", "StateByKey", "StateOrder", "make_state_order", "state_lru"]


class StateOrder(VictimOrder):
    """Evicts the state with the lowest ``score(record)``, and dead KV before any state.

    A subclass defines ``score`` for a record with a state. If a score can fall without an event of its
    node (with age, say), set ``period``: all scores are then recomputed every that many requests.

    O(log n) per victim and O(n log n) per period. There are few states, since each is large.

    Attributes:
        period: Requests between recomputations of all scores; 0 for none.
    """

    period = 0

    def __init__(self) -> None:
        # record.queued is the score of the record's one valid entry, in one or both heaps; None without one.
        self._all: list[tuple[Any, int, NodeRecord]] = []
        self._leaves: list[tuple[Any, int, NodeRecord]] = []
        self._dead: list[tuple[int, int, NodeRecord]] = []
        self._known: dict[int, NodeRecord] = {}
        self._parked: list[NodeRecord] = []
        self._out: set[int] = set()  # serials of those named, and neither evicted nor deferred yet
        self._requests = 0
        self._due = self.period
        if adds_nothing_per_node(self, StateOrder):
            self.merge = self.merged  # type: ignore[method-assign] # else nodes are not merged

    def score(self, record: NodeRecord) -> Any:
        """Rank of a record with a state; the lowest is evicted first."""
        raise NotImplementedError(f"{type(self).__name__} must define score(record)")

    def rescore(self, records: list[NodeRecord]) -> None:
        """Update what all scores have in common, just before they are recomputed."""

    # -- events ------------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        self._offer(record)

    def attach(self, record: NodeRecord) -> None:
        self._queue(record)

    def detach(self, record: NodeRecord) -> None:
        self._forget(record)
        self._out.discard(record.serial)
        if record.is_evictable:
            self._queue_dead(record)

    def consume(self, record: NodeRecord) -> None:
        self._queue(record)

    def merged(self, prefix: NodeRecord, tail: NodeRecord) -> None:  # prefix has no state, and so no place
        """Keep the queues right when two nodes are merged: all there is to do for a score of records alone.

        An order that takes no event of single nodes has this as its :meth:`merge`. One that keeps something
        for each node defines its own, which forgets that of ``prefix`` and calls this.
        """
        if tail.queued is not None:  # it has other tokens now, and maybe more uses
            self._queue(tail)

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._out.discard(record.serial)  # the rest stays queued, and may be named again

    def remove(self, record: NodeRecord) -> None:
        self._forget(record)
        self._out.discard(record.serial)
        parent = record.parent
        if parent is not None and parent.is_evictable:
            self._offer(parent)

    def unlock(self, record: NodeRecord) -> None:
        if record.is_evictable:
            self._offer(record)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self._requests += 1

    def defer(self, victim: Victim) -> None:
        self._out.discard(victim.record.serial)
        if victim.record.parent is not None:
            self._offer(victim.record)

    # -- victims -----------------------------------------------------------------------------

    def next_victim(self, pool: str) -> Victim | None:
        if self.period and self._requests >= self._due:
            self._due = self._requests + self.period
            self._rescore_all()
        if self._parked:
            self._unpark()
        if pool != "state":
            record = self._next_dead()
            if record is not None:
                self._out.add(record.serial)
                return Victim(record)
        heap, leaves_only = (self._leaves, True) if pool == "kv" else (self._all, False)
        moved = 0
        while heap:
            score, _, record = heap[0]
            queued = record.queued
            if record.state is None or queued is None or (queued is not score and queued != score):
                heapq.heappop(heap)
            elif record.serial in self._out:
                heapq.heappop(heap)  # it could not be evicted: defer queues it again
            elif leaves_only and record.live_children:
                heapq.heappop(heap)  # queued again when it becomes a leaf
            elif record.state.locks if self._goes_alone(record, pool) else record.locks:
                self._parked.append(heapq.heappop(heap)[2])
            elif self._is_current(heap, record, score, moved):
                self._out.add(record.serial)
                # Locked KV and the KV of a node with children are not evictable: then the state is evicted
                # alone.
                alone = record.live_children or record.locks
                return Victim(record, Action.TOMBSTONE if alone else Action.DELETE)
            else:
                moved += 1
        return None

    @staticmethod
    def _goes_alone(record: NodeRecord, pool: str) -> bool:
        """Whether the state of a record is evicted alone, however its KV is locked."""
        return bool(record.live_children or pool == "state" or (pool == "memory" and record.locks))

    def _is_current(
        self, heap: list[tuple[Any, int, NodeRecord]], record: NodeRecord, score: Any, moved: int
    ) -> bool:
        """Whether the top of a heap still has the score of its entry; requeues it if not."""
        current = self.score(record)
        if current == score:
            return True
        # A decision moves each state once at most. There are few, so to ask twice for each is no matter.
        check_key(record, current, self.score, moved >= len(self._known))
        heapq.heappop(heap)
        self._queue(record)
        return False

    def _next_dead(self) -> NodeRecord | None:
        dead = self._dead
        while dead:
            _, _, record = dead[0]
            if record.is_dead and not record.locks and record.serial not in self._out:
                return record
            heapq.heappop(dead)
        return None

    # -- the heaps ---------------------------------------------------------------------------

    def _offer(self, record: NodeRecord) -> None:
        if record.state is not None:
            self._queue(record)
        elif record.is_evictable:
            self._queue_dead(record)

    def _scored(self, record: NodeRecord) -> Any:
        score = record.queued = self.score(record)
        if score is None:  # a path without a return; in record.queued it would mean no entry
            raise no_rank("score", record)
        return score

    def _queue(self, record: NodeRecord) -> None:
        score = self._scored(record)
        self._known[record.serial] = record
        entry = (score, record.serial, record)
        self._push(self._all, entry)
        if not record.live_children:
            self._push(self._leaves, entry)

    def _push(self, heap: list[tuple[Any, int, NodeRecord]], entry: tuple[Any, int, NodeRecord]) -> None:
        heapq.heappush(heap, entry)
        if len(heap) > 4 * len(self._known) + 1024:  # mostly stale: keep one entry of each record
            heap[:] = {e[1]: e for e in heap if e[2].queued is e[0] or e[2].queued == e[0]}.values()
            heapq.heapify(heap)

    def _queue_dead(self, record: NodeRecord) -> None:
        heapq.heappush(self._dead, (record.recency, record.serial, record))

    def _forget(self, record: NodeRecord) -> None:
        record.queued = None
        self._known.pop(record.serial, None)

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for record in parked:
            state = record.state
            if state is None or record.queued is None:
                continue
            if state.locks:
                self._parked.append(record)
            else:
                self._queue(record)

    def _rescore_all(self) -> None:
        records = list(self._known.values())
        self.rescore(records)
        entries = []
        for record in records:
            score = self._scored(record)
            entries.append((score, record.serial, record))
        self._all = entries
        self._leaves = [entry for entry in entries if not entry[2].live_children]
        self._parked = []
        heapq.heapify(self._all)
        heapq.heapify(self._leaves)


class StateByKey(StateOrder):
    """Evicts the state whose node has the lowest key of a :class:`~costcache.orders.KeyedOrder`.

    Attributes:
        keyed: The order whose key it is.
    """

    def __init__(self, keyed: KeyedOrder) -> None:
        super().__init__()
        self.keyed = keyed
        self.score = keyed.key  # type: ignore[method-assign] # no call in between
        if not keyed.rises:
            self.touch = self.refresh = self._requeue  # type: ignore[method-assign] # bound where needed only

    def _requeue(self, record: NodeRecord) -> None:
        if record.queued is not None:
            self._queue(record)


class ConsumedLRU(StateOrder):
    """Evicts the state least recently resumed from.

    Plain LRU refreshes every state on a request's path, so a state stays as recent as the longer ones that
    superseded it. Here a request refreshes only the state that it resumes from.
    """

    def score(self, record: NodeRecord) -> int:
        state = record.state
        return 0 if state is None else state.recency


def state_lru() -> StateOrder:
    """Make an LRU order in which using a prefix uses every state on it, as in SGLang."""
    return StateByKey(LRU())


def make_state_order(order: VictimOrder) -> VictimOrder:
    """Make an order for a model with states: a keyed order ranks states by its key, others are unchanged."""
    return StateByKey(order) if isinstance(order, KeyedOrder) else order


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "consumed-lru": PolicySpec(
            lambda cost, pools, settings: ConsumedLRU(),
            "State least recently resumed from (models with states).",
            sees=frozenset({"states"}),
        )
    }
