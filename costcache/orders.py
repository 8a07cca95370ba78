"""Victim orders: which node is evicted next.

There are two ways to write one. A :class:`KeyedOrder` defines one function, ``key(record)``, and
the framework keeps the heap. A :class:`VictimOrder` takes the events and keeps its own
structure.
"""

from __future__ import annotations

import heapq
import math
import reprlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Final

from mypy_extensions import mypyc_attr

from costcache.errors import PluginError
from costcache.explained import Explained, Verdict
from costcache.records import (
    Action,
    NodeRecord,
    PoolState,
    RequestInfo,
    RequestRecord,
    Victim,
    tuple_maker,
)

__all__ = ["KeyedOrder", "VictimOrder", "adds_nothing_per_node", "check_key", "no_rank", "overridden"]

_DELETE: Final = Action.DELETE
_FIRST_LOOK: Final = 8
"""Entries that a decision moves before it looks whether keys hold still."""
_PER_NODE: Final = (
    *("insert", "use", "touch", "refresh", "split", "trim", "remove", "unlock"),
    *("attach", "detach", "consume"),
)
"""Events by which an order may keep something for each node."""
_victim: Final = tuple_maker(Victim)


@mypyc_attr(allow_interpreted_subclasses=True)
class VictimOrder:
    """Base of every order: takes the events of a pool and names victims.

    The pool updates a record before it calls the event. An event that a subclass does not
    override is never called, so unused events cost nothing. Orders must be deterministic:
    no wall clock, no ``hash()``, no unseeded randomness, because under tensor parallelism
    every rank evicts on its own and must choose the same victims.

    Attributes:
        forecasts: Whether :meth:`reuse_chance` is a forecast that falls with age, by which nodes can be
            compared, and not a prior.
    """

    forecasts: ClassVar[bool] = False
    _in_use: bool = False
    """Whether a pool ranks by it, or did: it knows the records of that one, and can serve no other."""

    def insert(self, record: NodeRecord) -> None:
        """A node was made, as a leaf."""

    def use(self, record: NodeRecord) -> None:
        """A request used the node for the first time: its uses, last use and recency changed.

        Called once per request and node; :meth:`touch` follows.
        """

    def touch(self, record: NodeRecord) -> None:
        """A request used the node, maybe again: its recency changed."""

    def refresh(self, record: NodeRecord) -> None:
        """The node's recency changed, or its priority rose, without a use: a waiting request wants it."""

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        """``prefix`` was split off the front of ``tail``, whose record stays; it inherits the history."""

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        """``tail``, the only child of ``prefix``, took its tokens over, with its uses if those were more.

        ``prefix`` has left the cache, and was not evicted. Both were used by the latest walk, and by nearly
        as many requests. Nodes are merged only under an order that overrides this, and where a path has so
        many that walking them would take long; see :class:`costcache.radix.tree.RadixTree`.
        """

    def trim(self, record: NodeRecord, tokens: int) -> None:
        """The last ``tokens`` tokens of the victim were evicted; the rest stays and may be evicted later."""

    def remove(self, record: NodeRecord) -> None:
        """The node was evicted. ``record.parent`` is still its parent, whose counts are up to date."""

    def unlock(self, record: NodeRecord) -> None:
        """The last lock on a leaf was released. Interior nodes raise no event: they are not evictable yet."""

    def attach(self, record: NodeRecord) -> None:
        """Models with states: a state was kept at the end of the node."""

    def detach(self, record: NodeRecord) -> None:
        """Models with states: the node's state was evicted, and the node stays."""

    def consume(self, record: NodeRecord) -> None:
        """Models with states: a request resumes from the node's state."""

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """A request ended. It made those of ``request.end`` and its ancestors that name it as ``creator``."""

    def next_victim(self, pool: str) -> Victim | None:
        """Name the next victim of ``pool``.

        If the victim is evicted, :meth:`remove` or :meth:`trim` follows before the next call. If neither
        does, it cannot be evicted now: do not name it again until :meth:`defer`, which comes at the
        end of the eviction.

        Returns:
            An unlocked leaf (or, for states, a node with a state), or None if there is none.
        """
        raise NotImplementedError(f"{type(self).__name__} must define next_victim(pool)")

    def defer(self, victim: Victim) -> None:
        """The victim could not be evicted, and the eviction is over; offer it again from now on."""

    def load(self, records: Iterable[NodeRecord]) -> None:
        """Start from the nodes of a cache that is in use, in order of creation."""
        for record in records:
            record.data = record.queued = None
            self.insert(record)

    def inherit(self, record: NodeRecord, history: NodeRecord) -> None:
        """A node takes over what is known of another record.

        That one is in another pool, or just leaving it: an order for a slower tier (see :meth:`below`) may
        read what the upper order keeps in ``history.data``. Keep nothing but ``record.data``, since not every
        record is inserted:

        - As a rule the node is about to be inserted, and the record is of the same tokens.
        - A node that the order has already is a copy on a slower tier. The record is that of the device,
          which is about to evict it again.
        - One that is never inserted stands for the record, which is about to be evicted, until the copy of
          it arrives. It is then the ``history`` of the copy.
        - If nothing is known of a new node, as when it was read from storage, the record may be that of the
          node before it.
        """

    def over_tier(self) -> None:
        """A slower tier takes what is evicted here: a token lost costs a reload, whatever its depth.

        Called before any other event.
        """

    def below(self, pool: PoolState) -> VictimOrder | None:  # for subclasses
        """Make an order for a slower tier that shares what this one has learned.

        Args:
            pool: The pool of that tier, which holds copies of what this order ranks. An order that remembers
                what was evicted remembers as much more as that holds.

        Returns:
            A new order; None if there is none, and that tier gets one of the policy that learns by itself.
        """
        return None

    def reuse_chance(self, record: NodeRecord, within: float = math.inf) -> float:
        """Chance, from 0 to 1, that a request uses the node again: what tiers of memory are decided by.

        For an order that makes no forecast, Laplace's rule of succession whatever the time: of a node's uses,
        all but the last were followed by another, so the chance is ``uses / (uses + 2)``.

        Args:
            record: A node of the pool.
            within: Time from now, in units of the clock; for ever by default.
        """
        return record.uses / (record.uses + 2.0)

    def ghost_chance(self, name: int, within: float = math.inf) -> float | None:
        """The same of an evicted node, by its ``prefix_hash()``; None if the order remembers none of it."""
        return None

    def compares(self) -> bool:
        """Whether it wants to be told what LRU would have found.

        Asked before any event by a host that can tell; if so, ``request.lru_matched`` is set in each
        ``finish``.
        """
        return False

    def against_lru(self) -> Verdict | None:
        """Comparison with LRU, for metrics; None if the order makes none."""
        return None

    def explained(self) -> Explained | None:
        """View of the order by its classes, for ``costcache explain``; None if it has no classes."""
        return None


@mypyc_attr(allow_interpreted_subclasses=True)
class KeyedOrder(VictimOrder):
    """An order given by a key: evicts the unlocked leaf with the lowest ``key(record)``.

    This is the whole of a policy::

        class LFU(KeyedOrder):
            def key(self, record):
                return (record.uses, record.recency)

    Keys of one order must compare with each other; ties are broken by ``record.serial``.
    O(log n) per victim, whatever the number of leaves.

    A key is a function of the record and of what the order has been told. Asked twice in one decision, it
    must give the same answer: an order whose key is not equal to itself (NaN, a clock, a random number, a
    counter of its own calls) is dropped for LRU. ``record.data`` is the subclass's own.

    Attributes:
        rises: True promises that no event but a split and a trim lowers a record's key. Then a stale
            entry is always too low, and it is enough to correct it when it surfaces. False requeues a
            record at each touch and refresh, and the last node of a request at its finish. A subclass that
            changes the key of another record at any other time calls :meth:`requeue` for it.
    """

    rises: ClassVar[bool] = True

    def __init__(self) -> None:
        # A record has at most one valid entry, the one whose key is in record.queued. Entries that arrive in
        # ascending order, almost all of them under LRU, are in a line; the others are in a heap. The lowest
        # of both is next. A line needs no comparisons of entries scattered over memory, as a heap does. An
        # entry, (key, serial, record), is Any because comparing two returns what comparing their keys
        # returns: not a bool for numpy's.
        self._line: deque[Any] = deque()
        self._heap: list[Any] = []
        self._queued = 0
        self._named: NodeRecord | None = None
        if adds_nothing_per_node(self, KeyedOrder):
            setattr(self, "merge", self.merged)  # noqa: B010 # a method, to mypy
        if not self.rises:
            # Bound per instance, so that a rising order does not pay for a call per touched node.
            for event in ("touch", "refresh"):
                if overridden(self, event) is None:
                    setattr(self, event, self.requeue)
            finish = overridden(self, "finish")
            if finish is not None:
                setattr(self, "finish", partial(self._finished, finish))  # noqa: B010 # a method, to mypy

    def key(self, record: NodeRecord) -> Any:
        """Rank of a record; the lowest is evicted first."""
        raise NotImplementedError(f"{type(self).__name__} must define key(record)")

    def requeue(self, record: NodeRecord) -> None:
        """Give a record its place anew, after its key may have changed; nothing for one that has no place."""
        if record.queued is None:
            return
        key = self.key(record)
        if key == record.queued:
            return
        self._put(record, key)

    def merged(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        """Keep the queue right when two nodes are merged: all there is to do for a key of records alone.

        An order that takes no event of single nodes has this as its :meth:`merge`. One that keeps something
        for each node defines its own, which forgets that of ``prefix`` and calls this.
        """
        if prefix.queued is not None:  # an entry of before it had a child
            prefix.queued = None
            self._queued -= 1
        self.requeue(tail)  # it has other tokens now, and more uses

    def insert(self, record: NodeRecord) -> None:
        if not record.live_children and not record.locks:
            self._push(record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self.requeue(tail)  # its depth and tokens changed, so its key may be lower now

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._named = None
        self.requeue(record)

    def remove(self, record: NodeRecord) -> None:
        self._named = None
        if record.queued is not None:
            record.queued = None
            self._queued -= 1
        parent = record.parent
        if (  # is_evictable, without the call: this is the hot path
            parent is not None
            and parent.queued is None
            and not parent.live_children
            and not parent.locks
            and parent.parent is not None
        ):
            self._push(parent)

    def unlock(self, record: NodeRecord) -> None:
        if record.queued is None and not record.live_children:
            self._push(record)

    def defer(self, victim: Victim) -> None:
        record = victim.record
        if record is self._named:
            self._named = None
        if record.queued is None and record.is_evictable:
            self._push(record)

    def next_victim(self, pool: str) -> Victim | None:
        line, heap, named = self._line, self._heap, self._named
        moved, look = 0, _FIRST_LOOK
        while line or heap:
            in_line = bool(line) and not (heap and heap[0] < line[0])
            key, serial, record = line[0] if in_line else heap[0]
            queued = record.queued
            if queued is key or (queued is not None and queued == key):  # else the entry is stale
                if record.live_children or record.locks or record is named:
                    record.queued = None  # queued again as an unlocked leaf, or by defer
                    self._queued -= 1
                elif self.rises and (current := self.key(record)) != key:
                    if current is None:
                        raise no_rank("key", record)
                    moved += 1
                    if moved == look:
                        check_key(record, current, self.key, moved > self._queued)
                        look *= 2
                    if not in_line:
                        record.queued = current
                        heapq.heapreplace(heap, (current, serial, record))
                        continue
                    line.popleft()
                    self._put(record, current)
                    continue
                else:
                    # The entry stays: after a trim, the usual end of an eviction, it is next again.
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

    def _finished(self, finish: Callable[..., None], request: RequestRecord, info: RequestInfo) -> None:
        finish(request, info)
        if request.end is not None:
            self.requeue(request.end)

    def _put(self, record: NodeRecord, key: Any) -> None:
        if key is None:  # a path without a return; in record.queued it would mean no place
            raise no_rank("key", record)
        record.queued = key
        entry: Any = (key, record.serial, record)
        line, heap = self._line, self._heap
        if not line or line[-1] < entry:
            line.append(entry)
        else:
            heapq.heappush(heap, entry)
        if len(line) + len(heap) > 2 * self._queued + 1024:  # mostly stale entries: drop them
            kept = [e for e in line if _is_valid(e)]
            line.clear()
            line.extend(kept)
            heap[:] = [e for e in heap if _is_valid(e)]
            heapq.heapify(heap)


def check_key(record: NodeRecord, key: Any, again: Callable[[NodeRecord], Any], too_often: bool) -> None:
    """Check that a record's key holds still, so that a decision that moves records ends.

    Args:
        record: The record.
        key: Its key, asked for just now.
        again: Gives it anew.
        too_often: Whether more records were moved in one decision than there are.

    Raises:
        PluginError: It does not.
    """
    other = again(record)
    if too_often or key != other:
        raise PluginError(
            f"the key of node #{record.serial} was {reprlib.repr(key)} and then {reprlib.repr(other)} in one "
            "decision, or is not equal to itself: a key must depend on the record and on events alone, and "
            "must not be NaN"
        )


def no_rank(what: str, record: NodeRecord) -> PluginError:
    """The error for a key or a score that is None."""
    return PluginError(f"the {what} of node #{record.serial} is None: return a value that can be compared")


def _is_valid(entry: Any) -> bool:
    key, _, record = entry
    queued = record.queued
    return queued is key or (queued is not None and bool(queued == key))


def adds_nothing_per_node(order: VictimOrder, base: type[VictimOrder]) -> bool:
    """Whether an order takes the events of single nodes just as a base class does, and so keeps no more."""
    return all(getattr(type(order), event) is getattr(base, event) for event in _PER_NODE)


def overridden(order: VictimOrder, event: str) -> Callable[..., None] | None:
    """The order's handler of ``event``, or None if it is the base class's empty one."""
    # A compiled class has no functions to compare, and its objects need not have a __dict__.
    inherited = getattr(type(order), event) is getattr(VictimOrder, event)
    if inherited and event not in getattr(order, "__dict__", ()):
        return None
    handler: Callable[..., None] = getattr(order, event)
    return handler
