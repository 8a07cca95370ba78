"""Victim orders: which node goes next.

There are two ways to write one. A :class:`KeyedOrder` defines one function, ``key(record)``;
the framework keeps the heap. A :class:`VictimOrder` takes the events and keeps its own
structure.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from mypy_extensions import mypyc_attr

from costcache.explained import Explained
from costcache.records import Action, NodeRecord, RequestInfo, RequestRecord, Victim, tuple_maker

__all__ = ["KeyedOrder", "VictimOrder", "overridden"]

_DELETE = Action.DELETE
_victim = tuple_maker(Victim)


@mypyc_attr(allow_interpreted_subclasses=True)
class VictimOrder:
    """Base of every order: takes the events of a cache and names victims.

    The cache updates a record before it calls the event. An event that a subclass does not
    override is never called, so unused events cost nothing. Orders must be deterministic:
    no wall clock, no ``hash()``, no unseeded randomness, because under tensor parallelism
    every rank evicts on its own and must choose the same victims.
    """

    def insert(self, record: NodeRecord) -> None:
        """A node was made, as a leaf."""

    def use(self, record: NodeRecord) -> None:
        """A request used the node for the first time: its uses and last use moved, and its recency.

        Once for a request and node; :meth:`touch` follows.
        """

    def touch(self, record: NodeRecord) -> None:
        """A request used the node, maybe again: its recency moved."""

    def refresh(self, record: NodeRecord) -> None:
        """The node's recency moved, or its priority rose, without a use: a waiting request wants it."""

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        """``prefix`` was split off the front of ``tail``, whose record stays; history is inherited."""

    def trim(self, record: NodeRecord, tokens: int) -> None:
        """The last ``tokens`` tokens of the victim went; the rest stays and may go later."""

    def remove(self, record: NodeRecord) -> None:
        """The node went. ``record.parent`` is still its parent, whose counts are up to date."""

    def lock(self, record: NodeRecord) -> None:
        """The node became locked: not a victim until it is unlocked."""

    def unlock(self, record: NodeRecord) -> None:
        """The last lock on a leaf went. Other nodes are unlocked without a word: they cannot go yet."""

    def attach(self, record: NodeRecord) -> None:
        """Models with states: a state was kept at the end of the node."""

    def detach(self, record: NodeRecord) -> None:
        """Models with states: the node's state went, and the node stays."""

    def consume(self, record: NodeRecord) -> None:
        """Models with states: a request goes on from the node's state."""

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """A request ended. What it made: ``request.end`` and its ancestors with its number as creator."""

    def next_victim(self, pool: str) -> Victim | None:
        """Name the next victim of ``pool``.

        If the victim is taken, :meth:`remove` or :meth:`trim` follows before the next call. If neither
        does, it cannot be taken now: do not name it again until :meth:`defer`, which comes at the
        end of the eviction.

        Returns:
            An unlocked leaf (or, for states, a node with a state), or None when there is none.
        """
        raise NotImplementedError(f"{type(self).__name__} must define next_victim(pool)")

    def defer(self, victim: Victim) -> None:
        """The victim could not be taken; the eviction is over; offer it again from now on."""

    def load(self, records: Iterable[NodeRecord]) -> None:
        """Start from the nodes of a cache that already exist, in order of creation."""
        for record in records:
            record.data = None
            self.insert(record)

    def explained(self) -> Explained | None:
        """The order seen by its classes, for ``costcache explain``; None where it has none."""
        return None


@mypyc_attr(allow_interpreted_subclasses=True)
class KeyedOrder(VictimOrder):
    """An order given by a key: the unlocked leaf with the lowest ``key(record)`` goes first.

    This is the whole of a policy::

        class LFU(KeyedOrder):
            def key(self, record):
                return (record.uses, record.recency)

    Keys of one order must compare with each other; equal keys go by ``record.serial``.
    O(log n) per victim, whatever the number of leaves.

    Attributes:
        rises: True promises that a touch, a refresh and a finish never lower a record's key.
            Then an outdated heap entry is always too low, and it is enough to correct it when it
            surfaces. False re-queues a record at every touch.
    """

    rises: ClassVar[bool] = True

    def __init__(self) -> None:
        # A record has one valid entry at most: the one whose key is in record.data. Entries that come in
        # ascending order, under LRU almost all, stand in a line; the others are in a heap. The lowest of both
        # is next. A line costs no comparisons of entries all over the memory, as a heap does. An entry, (key,
        # serial, record), is Any since to compare two gives what their keys give: numpy's give no bool.
        self._line: deque[Any] = deque()
        self._heap: list[Any] = []
        self._queued = 0
        self._named: NodeRecord | None = None
        if not self.rises:
            # Bound per instance, so that a rising order does not pay for a call per touched node.
            for event in ("touch", "refresh"):
                if overridden(self, event) is None:
                    setattr(self, event, self._requeue)

    def key(self, record: NodeRecord) -> Any:
        """Rank of a record; the lowest goes first."""
        raise NotImplementedError(f"{type(self).__name__} must define key(record)")

    def insert(self, record: NodeRecord) -> None:
        if not record.live_children and not record.locks:
            self._push(record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self._requeue(tail)  # its depth and tokens changed: its key may be lower now

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._named = None
        self._requeue(record)

    def remove(self, record: NodeRecord) -> None:
        self._named = None
        if record.data is not None:
            record.data = None
            self._queued -= 1
        parent = record.parent
        if (  # is_evictable, without the call: this is the hot path
            parent is not None
            and parent.data is None
            and not parent.live_children
            and not parent.locks
            and parent.parent is not None
        ):
            self._push(parent)

    def unlock(self, record: NodeRecord) -> None:
        if record.data is None and not record.live_children:
            self._push(record)

    def defer(self, victim: Victim) -> None:
        record = victim.record
        if record is self._named:
            self._named = None
        if record.data is None and record.is_evictable:
            self._push(record)

    def next_victim(self, pool: str) -> Victim | None:
        line, heap, named = self._line, self._heap, self._named
        while line or heap:
            in_line = bool(line) and not (heap and heap[0] < line[0])
            key, serial, record = line[0] if in_line else heap[0]
            data = record.data
            if data is not None and data == key:  # else left over from an earlier place in the queue
                if record.live_children or record.locks or record is named:
                    record.data = None  # comes back as an unlocked leaf again, or with defer
                    self._queued -= 1
                elif self.rises and (current := self.key(record)) != key:
                    if not in_line:
                        record.data = current
                        heapq.heapreplace(heap, (current, serial, record))
                        continue
                    line.popleft()
                    self._put(record, current)
                    continue
                else:
                    # It stays in its place: a trim leaves it there.
                    self._named = record
                    return _victim((record, _DELETE, None))
            if in_line:
                line.popleft()
            else:
                heapq.heappop(heap)
        self._named = None
        return None

    def _push(self, record: NodeRecord) -> None:
        self._queued += 1
        self._put(record, self.key(record))

    def _requeue(self, record: NodeRecord) -> None:
        if record.data is None:
            return
        key = self.key(record)
        if key == record.data:
            return
        self._put(record, key)

    def _put(self, record: NodeRecord, key: Any) -> None:
        record.data = key
        entry: Any = (key, record.serial, record)
        line, heap = self._line, self._heap
        if not line or line[-1] < entry:
            line.append(entry)
        else:
            heapq.heappush(heap, entry)
        if len(line) + len(heap) > 2 * self._queued + 1024:  # mostly leftovers: drop them
            kept = [e for e in line if e[2].data is not None and e[2].data == e[0]]
            line.clear()
            line.extend(kept)
            heap[:] = [e for e in heap if e[2].data is not None and e[2].data == e[0]]
            heapq.heapify(heap)


def overridden(order: VictimOrder, event: str) -> Callable[..., None] | None:
    """The order's handler of ``event``, or None where it is the base class's empty one."""
    # Of a compiled class there are no functions to compare, and its objects need not have a __dict__.
    inherited = getattr(type(order), event) is getattr(VictimOrder, event)
    if inherited and event not in getattr(order, "__dict__", ()):
        return None
    handler: Callable[..., None] = getattr(order, event)
    return handler
