"""Linked queues of records, and an order that keeps its records in them.

The queues of the caching literature hold objects that can be evicted at any time. Here only unlocked
leaves can. A node whose turn comes while it is not evictable leaves the line. Once it is evictable it returns
to the old end, where it is next. The event that makes it evictable again (the last child removed, the last
lock released) pays for leaving the line, so a victim costs O(1), amortised, whatever the number of inner
nodes.
"""

from __future__ import annotations

from typing import Self

from costcache.orders import VictimOrder
from costcache.records import NodeRecord, Victim

__all__ = ["Entry", "Queue", "QueueOrder"]


class Entry:
    """A record's entry in a queue, kept in ``record.data``.

    Attributes:
        record: The record.
        queue: The queue that it belongs to, whether it is in the line or not.
        newer: Its younger neighbour; None outside the line.
        older: Its older neighbour; None outside the line.
        uses: ``record.uses`` when the policy last looked; uses since then are hits.
    """

    __slots__ = ("newer", "older", "queue", "record", "uses")

    def __init__(self, record: NodeRecord, queue: Queue) -> None:
        self.record = record
        self.queue = queue
        self.newer: Entry | None = None
        self.older: Entry | None = None
        self.uses = record.uses

    def twin(self, prefix: NodeRecord) -> Self:
        """Make the entry of a prefix that was split off this record, with the same history."""
        entry = type(self)(prefix, self.queue)
        entry.uses = self.uses
        return entry


class Queue:
    """A doubly linked line of entries from old to new.

    Attributes:
        tokens: Tokens of the records that belong to it, those outside the line included.
    """

    __slots__ = ("_end", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        # A sentinel that joins both ends: older than the oldest and newer than the newest.
        self._end = end = Entry(NodeRecord(0, None, 0, 0), self)
        end.newer = end.older = end

    @property
    def oldest(self) -> Entry | None:
        """The entry at the old end of the line; None if the line is empty."""
        entry = self._end.newer
        return entry if entry is not self._end else None

    def newer(self, entry: Entry) -> Entry | None:
        """Return the next younger entry of the line; None at the new end."""
        return entry.newer if entry.newer is not self._end else None

    def add_newest(self, entry: Entry) -> None:
        """Add an entry that is outside the line at the new end."""
        self._link(entry, self._end)

    def add_oldest(self, entry: Entry) -> None:
        """Add an entry that is outside the line at the old end."""
        oldest = self._end.newer
        if oldest is not None:
            self._link(entry, oldest)

    def add_before(self, entry: Entry, younger: Entry | None) -> None:
        """Add an entry that is outside the line just on the old side of ``younger``; None for the new end."""
        self._link(entry, self._end if younger is None else younger)

    def unlink(self, entry: Entry) -> None:
        """Take an entry out of the line; does nothing if it is outside."""
        newer, older = entry.newer, entry.older
        if newer is not None and older is not None:
            newer.older, older.newer = older, newer
            entry.newer = entry.older = None

    def _link(self, entry: Entry, younger: Entry) -> None:
        older = younger.older
        if older is not None:
            older.newer = younger.older = entry
            entry.older, entry.newer = older, younger


class QueueOrder(VictimOrder):
    """An order that keeps its records in queues; ``record.data`` is a record's entry.

    A subclass defines :meth:`insert` (with :meth:`enter`) and ``next_victim`` (with :meth:`name` and
    :meth:`leave_line`).
    """

    def __init__(self) -> None:
        self._named: Entry | None = None
        self._entries = 0

    def enter(self, entry: Entry) -> None:
        """Add a new record at the new end of its entry's queue."""
        record = entry.record
        record.data = entry
        self._entries += 1
        entry.queue.tokens += record.tokens
        entry.queue.add_newest(entry)

    def move(self, entry: Entry, queue: Queue) -> None:
        """Move a record to the new end of a queue, from any queue."""
        self.leave_line(entry)
        tokens = entry.record.tokens
        entry.queue.tokens -= tokens
        queue.tokens += tokens
        entry.queue = queue
        queue.add_newest(entry)

    def leave_line(self, entry: Entry) -> None:
        """Take a record out of the line of its queue, for good or until it is evictable."""
        entry.queue.unlink(entry)

    def rejoin(self, entry: Entry) -> None:
        """Put a record that is evictable again back into its line, where it is next."""
        entry.queue.add_oldest(entry)

    def can_name(self, entry: Entry) -> bool:
        """Whether a record may be named now."""
        return entry is not self._named and entry.record.is_evictable

    def name(self, entry: Entry) -> Victim:
        """Name a record. It keeps its position: after a trim it is next again."""
        self._named = entry
        return Victim(entry.record)

    def oldest(self, queue: Queue) -> Entry | None:
        """Return a queue's oldest record that may be named; older ones leave the line until they may."""
        while (entry := queue.oldest) is not None and not self.can_name(entry):
            self.leave_line(entry)
        return entry

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        entry: Entry = tail.data
        prefix.data = twin = entry.twin(prefix)
        self._entries += 1
        if entry.newer is not None:  # on the young side: a tail is evicted before its prefix
            entry.queue.add_before(twin, entry.queue.newer(entry))

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        entry: Entry = prefix.data
        rest: Entry = tail.data
        self._entries -= 1
        self.leave_line(entry)
        entry.queue.tokens -= prefix.tokens
        rest.queue.tokens += prefix.tokens
        rest.uses = entry.uses  # as the record's are those of the prefix now
        prefix.data = None

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._named = None
        record.data.queue.tokens -= tokens

    def remove(self, record: NodeRecord) -> None:
        entry: Entry = record.data
        self._named = None
        self._entries -= 1
        self.leave_line(entry)
        entry.queue.tokens -= record.tokens
        record.data = None
        if record.parent is not None:
            self._offer(record.parent)

    def unlock(self, record: NodeRecord) -> None:
        self._offer(record)

    def defer(self, victim: Victim) -> None:
        self._named = None
        self._offer(victim.record)

    def _offer(self, record: NodeRecord) -> None:
        """Let a record back into the line, if it is evictable and outside."""
        if record.is_evictable:
            entry: Entry = record.data
            if entry.newer is None:
                self.rejoin(entry)
