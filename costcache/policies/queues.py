"""What policies of queues are made of: linked queues of records, and an order that keeps them.

The queues of the caching literature hold objects that may go at any time. Here a node may go only as
an unlocked leaf. A node whose turn comes while it may not go leaves its queue, and returns to the old end
of it, where it is next, once it may. Each departure is paid for by the event that ends it (the last
child went, the last lock went), so that a victim costs O(1), amortised, whatever the number of inner nodes.
"""

from __future__ import annotations

from typing import Self

from costcache.orders import VictimOrder
from costcache.records import NodeRecord, Victim

__all__ = ["Place", "Queue", "QueueOrder"]


class Place:
    """A record's place in a queue, kept in ``record.data``.

    Attributes:
        record: The record.
        queue: The queue that it belongs to, in its line or outside.
        newer: Neighbour that is younger; None outside the line.
        older: Neighbour that is older; None outside the line.
        uses: ``record.uses`` when the policy last looked: what was added since are hits.
    """

    __slots__ = ("newer", "older", "queue", "record", "uses")

    def __init__(self, record: NodeRecord, queue: Queue) -> None:
        self.record = record
        self.queue = queue
        self.newer: Place | None = None
        self.older: Place | None = None
        self.uses = record.uses

    def twin(self, prefix: NodeRecord) -> Self:
        """The place of a prefix that was split off this place's record, with the same history."""
        place = type(self)(prefix, self.queue)
        place.uses = self.uses
        return place


class Queue:
    """A doubly linked queue from old to new.

    Attributes:
        tokens: Tokens of the records that belong to it, those outside the line included.
    """

    __slots__ = ("_end", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        # Both ends meet here: it is older than the oldest and newer than the newest.
        self._end = end = Place(NodeRecord(0, None, 0, 0), self)
        end.newer = end.older = end

    @property
    def oldest(self) -> Place | None:
        """The old end of the line, None when nobody stands in it."""
        place = self._end.newer
        return place if place is not self._end else None

    def newer(self, place: Place) -> Place | None:
        """The next younger place of the line, None at the new end."""
        return place.newer if place.newer is not self._end else None

    def add_newest(self, place: Place) -> None:
        """Put a place that is outside at the new end."""
        self._link(place, self._end)

    def add_oldest(self, place: Place) -> None:
        """Put a place that is outside at the old end."""
        oldest = self._end.newer
        if oldest is not None:
            self._link(place, oldest)

    def add_before(self, place: Place, younger: Place | None) -> None:
        """Put a place that is outside just on the old side of ``younger``, None for the new end."""
        self._link(place, self._end if younger is None else younger)

    def unlink(self, place: Place) -> None:
        """Take a place out of the line; nothing happens when it is outside."""
        newer, older = place.newer, place.older
        if newer is not None and older is not None:
            newer.older, older.newer = older, newer
            place.newer = place.older = None

    def _link(self, place: Place, younger: Place) -> None:
        older = younger.older
        if older is not None:
            older.newer = younger.older = place
            place.older, place.newer = older, younger


class QueueOrder(VictimOrder):
    """An order whose records stand in queues, each ``record.data`` being its place.

    A subclass defines :meth:`insert` (with :meth:`enter`) and ``next_victim`` (with :meth:`name` and
    :meth:`step_out`).
    """

    def __init__(self) -> None:
        self._named: Place | None = None
        self._places = 0

    def enter(self, place: Place) -> None:
        """A new record joins the new end of its place's queue."""
        record = place.record
        record.data = place
        self._places += 1
        place.queue.tokens += record.tokens
        place.queue.add_newest(place)

    def move(self, place: Place, queue: Queue) -> None:
        """A record goes to the new end of a queue, from wherever it is."""
        self.leave_line(place)
        tokens = place.record.tokens
        place.queue.tokens -= tokens
        queue.tokens += tokens
        place.queue = queue
        queue.add_newest(place)

    def leave_line(self, place: Place) -> None:
        """A record leaves the line of its queue, for good or for a while."""
        place.queue.unlink(place)

    def come_back(self, place: Place) -> None:
        """A record that may go again returns to where it is next."""
        place.queue.add_oldest(place)

    def can_go(self, place: Place) -> bool:
        """Whether a record may be named now."""
        return place is not self._named and place.record.is_evictable

    def name(self, place: Place) -> Victim:
        """Name a record. It keeps its place: a trim leaves it next."""
        self._named = place
        return Victim(place.record)

    def oldest(self, queue: Queue) -> Place | None:
        """The oldest record of a queue that may go; older ones step out of the line until they may."""
        while (place := queue.oldest) is not None and not self.can_go(place):
            self.leave_line(place)
        return place

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        place: Place = tail.data
        prefix.data = twin = place.twin(prefix)
        self._places += 1
        if place.newer is not None:  # on the young side: a tail goes before its prefix
            place.queue.add_before(twin, place.queue.newer(place))

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._named = None
        record.data.queue.tokens -= tokens

    def remove(self, record: NodeRecord) -> None:
        place: Place = record.data
        self._named = None
        self._places -= 1
        self.leave_line(place)
        place.queue.tokens -= record.tokens
        record.data = None
        if record.parent is not None:
            self._freed(record.parent)

    def unlock(self, record: NodeRecord) -> None:
        self._freed(record)

    def defer(self, victim: Victim) -> None:
        self._named = None
        self._freed(victim.record)

    def _freed(self, record: NodeRecord) -> None:
        """A record may go again, if it is an unlocked leaf now."""
        if record.is_evictable:
            place: Place = record.data
            if place.newer is None:
                self.come_back(place)
