"""Orders for ends of prefixes: blocks of windows and states, ranked against leaves of the tree.

To an order that sees states an end is one. Other orders rank nodes of a tree, and are told nothing of ends.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from costcache.orders import KeyedOrder, VictimOrder
from costcache.policies.states import StateOrder
from costcache.records import Action, NodeRecord, RequestInfo, RequestRecord, Victim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from costcache.binding import Binding
    from costcache.records import PoolState

__all__ = ["EndsBeside", "EndsByKey", "rank_ends"]


def rank_ends(binding: Binding, pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
    """Make an order of the binding's policy that ranks ends and leaves."""
    if "states" in binding.spec.sees:
        return binding.make_order(pools)
    (pool,) = pools
    bytes_per_token = binding.cost.token.kv_bytes
    tokens = pool._replace(
        unit="tokens",
        capacity=pool.capacity // bytes_per_token,
        free=pool.free // bytes_per_token,
        evictable=pool.evictable // bytes_per_token,
        reserved=pool.reserved // bytes_per_token,
    )
    name, order = binding.make_order((tokens,))
    if binding.spec.leaves_only and isinstance(order, KeyedOrder):
        return name, EndsByKey(order)
    return name, EndsBeside(order)


class EndsByKey(StateOrder):
    """Ranks an end by the key that a node with its history would have; with a leaf, by the lower of the two.

    Both are given up together: an end is of no use without the leaf, nor the leaf without it.

    Attributes:
        keyed: The order whose key it is.
    """

    def __init__(self, keyed: KeyedOrder) -> None:
        super().__init__()
        self.keyed = keyed
        self._key = keyed.key
        self._like = NodeRecord(0, None, 0, 0)
        if not keyed.rises:
            self.touch = self.refresh = self._requeue  # type: ignore[method-assign] # bound where needed only

    def score(self, record: NodeRecord) -> Any:
        state, like = record.state, self._like
        if state is None:
            return self._key(record)
        like.inherit(record)
        like.serial, like.tokens, like.depth = record.serial, record.tokens, record.depth
        like.uses, like.last_use = state.uses, state.last_use
        like.recency, like.created = state.recency, state.created
        key = self._key(like)
        return key if record.live_children else min(key, self._key(record))

    def _requeue(self, record: NodeRecord) -> None:
        if record.data is not None:
            self._queue(record)


class EndsBeside(StateOrder):
    """Lets an order that ranks nodes choose among leaves; an end within a path goes by when it was last used.

    It goes before the leaf that the order names if it was used less recently. ``record.data`` is the order's.

    Attributes:
        leaves: The order.
    """

    def __init__(self, leaves: VictimOrder) -> None:
        super().__init__()
        self.leaves = leaves
        self._count = 0
        self._ends: list[tuple[int, int, NodeRecord]] = []  # a heap of those within paths

    def next_victim(self, pool: str) -> Victim | None:  # noqa: ARG002  # there is one
        victim = self._next()
        if victim is not None:
            self._out.add(victim.record.serial)
        return victim

    def _next(self) -> Victim | None:
        dead = self._next_dead()
        if dead is not None:
            return Victim(dead)
        within, leaf = self._next_within(), self.leaves.next_victim("kv")
        for _ in range(len(self._out)):  # an order that names one for ever is told so by the pool
            if leaf is None or leaf.record.serial not in self._out:
                break
            leaf = self.leaves.next_victim("kv")  # that one was dead, and refused
        if within is None or within.state is None:
            return leaf
        if leaf is not None:
            if leaf.record.recency <= within.state.recency:
                return leaf
            self.leaves.defer(leaf)
        return Victim(within, Action.TOMBSTONE)

    def _next_within(self) -> NodeRecord | None:
        """The end within a path that was used least recently, unless it is in use."""
        ends, in_use = self._ends, []
        found = None
        while ends and found is None:
            recency, _, record = ends[0]
            state = record.state
            if state is None or not record.live_children or record.serial in self._out:
                heapq.heappop(ends)  # pushed again as soon as that changes
            elif state.recency != recency:
                heapq.heapreplace(ends, (state.recency, record.serial, record))
            elif state.locks:
                in_use.append(heapq.heappop(ends))
            else:
                found = record
        for entry in in_use:
            heapq.heappush(ends, entry)
        return found

    def _push_end(self, record: NodeRecord) -> None:
        state, ends = record.state, self._ends
        if state is not None and record.live_children:
            heapq.heappush(ends, (state.recency, record.serial, record))
            if len(ends) > 4 * self._count + 1024:  # mostly stale: keep one entry of each record
                ends[:] = {entry[1]: entry for entry in ends if entry[2].state is not None}.values()
                heapq.heapify(ends)

    # -- events ------------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        self.leaves.insert(record)
        if record.is_evictable:
            self._queue_dead(record)
        parent = record.parent
        if parent is not None and parent.live_children == 1:
            self._push_end(parent)  # it was a leaf

    def use(self, record: NodeRecord) -> None:
        self.leaves.use(record)

    def touch(self, record: NodeRecord) -> None:
        self.leaves.touch(record)

    def refresh(self, record: NodeRecord) -> None:
        self.leaves.refresh(record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self.leaves.split(prefix, tail)

    def attach(self, record: NodeRecord) -> None:
        self._count += 1
        self._push_end(record)

    def consume(self, record: NodeRecord) -> None:
        """Nothing: a stale entry is corrected when it surfaces."""

    def detach(self, record: NodeRecord) -> None:
        self._count -= 1
        self._out.discard(record.serial)
        if record.is_evictable:
            self._queue_dead(record)

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._out.discard(record.serial)
        self.leaves.trim(record, tokens)

    def remove(self, record: NodeRecord) -> None:
        self._out.discard(record.serial)
        self.leaves.remove(record)
        parent = record.parent
        if parent is not None and parent.is_evictable and parent.state is None:
            self._queue_dead(parent)

    def unlock(self, record: NodeRecord) -> None:
        self.leaves.unlock(record)
        if record.is_evictable and record.state is None:
            self._queue_dead(record)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self.leaves.finish(request, info)

    def defer(self, victim: Victim) -> None:
        record = victim.record
        self._out.discard(record.serial)
        self.leaves.defer(victim)
        if record.parent is None:
            return
        if record.state is None and record.is_evictable:
            self._queue_dead(record)
        self._push_end(record)

    def load(self, records: Iterable[NodeRecord]) -> None:
        self.leaves.load(records)
