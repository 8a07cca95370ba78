"""Pins and locks: the records that no eviction may free."""

from __future__ import annotations

from typing import Any

from costcache.pool.ranked import RankedRecords
from costcache.records import NodeRecord

__all__ = ["PinnableRecords"]


class PinnableRecords(RankedRecords):
    """Ranked records that running requests pin.

    Attributes:
        pinned: Tokens of locked records, if the host pins with :meth:`pin`.
        pinned_states: States of the records that are locked.
    """

    __slots__ = ("pinned", "pinned_states")

    def _forget(self) -> None:
        super()._forget()
        self.pinned = self.pinned_states = 0

    def pin(self, record: NodeRecord) -> None:
        """Protect a record, its ancestors and its state from eviction until :meth:`unpin`."""
        record.pins += 1
        # A locked record holds one lock on its parent, so the walk ends at the first that was locked.
        current: NodeRecord | None = record
        while current is not None:
            current.locks += 1
            if current.locks > 1:
                break
            self.pinned += current.tokens
            current = current.parent
        state: Any = record.state  # a host's may count its locks itself, which compiled code would not see
        if state is not None:
            state.locks += 1
            self.pinned_states += state.locks == 1

    def unpin(self, record: NodeRecord) -> None:
        """Undo one :meth:`pin` of a record."""
        state: Any = record.state  # as in pin
        if state is not None and state.locks:
            state.locks -= 1
            self.pinned_states -= state.locks == 0
        record.pins -= 1
        current: NodeRecord | None = record
        while current is not None:
            current.locks -= 1
            if current.locks:
                return
            self.pinned -= current.tokens
            if current.parent is not None:
                self._unlocked(current)
            current = current.parent

    def lock(self, record: NodeRecord) -> None:
        """A record became locked. For a host that counts locks itself, those of ancestors too."""
        record.locks = 1

    def unlock(self, record: NodeRecord) -> None:
        """The last lock on a record was released. For a host that counts locks itself."""
        record.locks = 0
        self._unlocked(record)

    def _unlocked(self, record: NodeRecord) -> None:
        handler = self._unlock
        if handler is not None and not record.live_children:
            try:
                handler(record)
            except BaseException as error:
                self._failed("unlock", error)
