"""Orders for models with states: which checkpoint, and which leaf, goes next.

A state is an entry of its own: on a node with children it can go alone and leaves a tombstone, on a leaf
it takes the leaf along, since KV behind the last state is dead. A leaf without a state goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from costcache.errors import PluginError
from costcache.orders import KeyedOrder, VictimOrder
from costcache.policies.lru import LRU
from costcache.records import Action, NodeRecord, RequestInfo, RequestRecord, Victim

if TYPE_CHECKING:
    from costcache.model import ModelSpec

__all__ = ["StateByKey", "StateOrder", "make_state_order", "needs_states", "state_lru"]


def needs_states(model: ModelSpec) -> str | None:
    """``supports`` of a policy for models with states: why it does not serve ``model``, or None."""
    if model.has_states:
        return None
    return "it orders checkpoints of recurrent states, and this model has none; take hazard or lru"


class StateOrder(VictimOrder):
    """The entry with the lowest ``score(record)`` goes first; dead KV goes before all.

    A subclass defines ``score``, on a record with a state. Where a score can fall without an event
    of its node (with age, say), ``period`` makes all of them be taken anew every so many requests.

    O(log n) per victim, and O(n log n) per period; n states are few, since each is large.

    Attributes:
        period: Requests after which all scores are taken anew; 0 for never.
    """

    period = 0

    def __init__(self) -> None:
        # record.data is the score of the one entry that counts, in one or both heaps; None for none.
        self._all: list[tuple[Any, int, NodeRecord]] = []
        self._leaves: list[tuple[Any, int, NodeRecord]] = []
        self._dead: list[tuple[int, int, NodeRecord]] = []
        self._known: dict[int, NodeRecord] = {}
        self._parked: list[NodeRecord] = []
        self._named: NodeRecord | None = None
        self._requests = 0
        self._due = self.period

    def score(self, record: NodeRecord) -> Any:
        """Rank of a record with a state; the lowest goes first."""
        raise NotImplementedError(f"{type(self).__name__} must define score(record)")

    def rescore(self, records: list[NodeRecord]) -> None:
        """All scores are about to be taken anew: what they depend on in common may be brought up to date."""

    # -- events ------------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        record.data = None
        self._offer(record)

    def attach(self, record: NodeRecord) -> None:
        self._enlist(record)

    def detach(self, record: NodeRecord) -> None:
        self._forget(record)
        self._named = None
        if record.is_evictable:
            self._bury(record)

    def consume(self, record: NodeRecord) -> None:
        self._enlist(record)

    def remove(self, record: NodeRecord) -> None:
        self._forget(record)
        self._named = None
        parent = record.parent
        if parent is not None and parent.is_evictable:
            self._offer(parent)

    def unlock(self, record: NodeRecord) -> None:
        if record.is_evictable:
            self._offer(record)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:  # all are alike
        self._requests += 1

    def defer(self, victim: Victim) -> None:
        self._named = None
        if victim.record.parent is not None:
            self._offer(victim.record)

    def load(self, records: Iterable[NodeRecord]) -> None:
        for record in records:
            self.insert(record)

    # -- victims -----------------------------------------------------------------------------

    def next_victim(self, pool: str) -> Victim | None:
        if self.period and self._requests >= self._due:
            self._due = self._requests + self.period
            self._take_anew()
        if self._parked:
            self._unpark()
        if pool != "state":
            record = self._next_dead()
            if record is not None:
                self._named = record
                return Victim(record)
        heap, leaves_only = (self._leaves, True) if pool == "kv" else (self._all, False)
        while heap:
            score, _, record = heap[0]
            if record.data is None or record.data != score or record.state is None:
                heapq.heappop(heap)
            elif record is self._named:
                heapq.heappop(heap)  # it could not go: defer brings it back
            elif leaves_only and record.live_children:
                heapq.heappop(heap)  # comes back as a leaf
            elif record.state.locks if record.live_children or pool == "state" else record.locks:
                self._parked.append(heapq.heappop(heap)[2])
            elif self._is_low(heap, record, score):
                self._named = record
                # KV that somebody uses stays, with children or without, and its state can go alone.
                alone = record.live_children or record.locks
                return Victim(record, Action.TOMBSTONE if alone else Action.DELETE)
        self._named = None
        return None

    def _is_low(self, heap: list[tuple[Any, int, NodeRecord]], record: NodeRecord, score: Any) -> bool:
        """Whether the head of a heap still has the score that it is listed with; lists it anew if not."""
        current = self.score(record)
        if current == score:
            return True
        heapq.heappop(heap)
        self._enlist(record)
        return False

    def _next_dead(self) -> NodeRecord | None:
        dead = self._dead
        while dead:
            _, _, record = dead[0]
            if record.is_dead and not record.locks and record is not self._named:
                return record
            heapq.heappop(dead)
        return None

    # -- the heaps ---------------------------------------------------------------------------

    def _offer(self, record: NodeRecord) -> None:
        if record.state is not None:
            self._enlist(record)
        elif record.is_evictable:
            self._bury(record)

    def _enlist(self, record: NodeRecord) -> None:
        score = record.data = self.score(record)
        self._known[record.serial] = record
        entry = (score, record.serial, record)
        self._push(self._all, entry)
        if not record.live_children:
            self._push(self._leaves, entry)

    def _push(self, heap: list[tuple[Any, int, NodeRecord]], entry: tuple[Any, int, NodeRecord]) -> None:
        heapq.heappush(heap, entry)
        if len(heap) > 4 * len(self._known) + 1024:  # mostly outdated: keep one of each
            heap[:] = {e[1]: e for e in heap if e[2].data is not None and e[2].data == e[0]}.values()
            heapq.heapify(heap)

    def _bury(self, record: NodeRecord) -> None:
        heapq.heappush(self._dead, (record.recency, record.serial, record))

    def _forget(self, record: NodeRecord) -> None:
        record.data = None
        self._known.pop(record.serial, None)

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for record in parked:
            state = record.state
            if state is None or record.data is None:
                continue
            if state.locks:
                self._parked.append(record)
            else:
                self._enlist(record)

    def _take_anew(self) -> None:
        records = list(self._known.values())
        self.rescore(records)
        entries = []
        for record in records:
            score = record.data = self.score(record)
            entries.append((score, record.serial, record))
        self._all = entries
        self._leaves = [entry for entry in entries if not entry[2].live_children]
        self._parked = []
        heapq.heapify(self._all)
        heapq.heapify(self._leaves)


class StateByKey(StateOrder):
    """A keyed order on states: they go by the key of their node."""

    def __init__(self, keyed: KeyedOrder) -> None:
        super().__init__()
        self.score = keyed.key  # type: ignore[method-assign] # no call in between
        if not keyed.rises:
            self.touch = self.refresh = self._requeue  # type: ignore[method-assign] # bound where needed only

    def _requeue(self, record: NodeRecord) -> None:
        if record.data is not None:
            self._enlist(record)


def state_lru() -> StateOrder:
    """Least recently used first, where using a prefix uses every state on it, as in SGLang."""
    return StateByKey(LRU())


def make_state_order(name: str, order: VictimOrder) -> VictimOrder:
    """An order for a model with states: the order itself where it knows them, a keyed order by its key.

    Raises:
        PluginError: The order has a structure of its own that knows leaves only.
    """
    if isinstance(order, StateOrder):
        return order
    if isinstance(order, KeyedOrder):
        return StateByKey(order)
    raise PluginError(
        f"policy {name!r} orders leaves by a structure of its own and knows no states: take one with a key "
        "(lru, lfu, fifo, slru, ...), or one made for states (hazard, seglen, marconi)"
    )
