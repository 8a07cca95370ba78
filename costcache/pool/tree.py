"""The tree of a pool's records, and what a host reports of it: uses, new nodes, splits, merges, removals."""

from __future__ import annotations

from typing import Any

from costcache.eviction import EvictionCounters
from costcache.pool.pinned import PinnableRecords
from costcache.records import Asker, Clock, NodeRecord, RequestRecord, State

__all__ = ["RecordTree"]


class RecordTree(PinnableRecords):
    """Pinnable records as a tree, through ``record.parent``.

    In a *flat* one every record is a leaf under :attr:`root`.

    Attributes:
        clock: Logical time.
        flat: Whether records are leaves under the root, whatever their depth.
        lower_tier: Whether this is a copy of another pool's memory: requests end in that one.
        root: Parent of the records that have no parent of their own.
        cached: Tokens of the records.
        states: States of the records.
    """

    __slots__ = ("_serial", "cached", "clock", "flat", "lower_tier", "root", "states")

    def __init__(
        self,
        clock: Clock,
        counters: EvictionCounters,
        *,
        flat: bool,
        lower_tier: bool,
        time_budget: float,
        drops_slow: bool,
    ) -> None:
        super().__init__(counters, time_budget, drops_slow)
        self.clock = clock
        self.flat = flat
        self.lower_tier = lower_tier
        self._serial = 0

    def _forget(self) -> None:
        super()._forget()
        self.root = NodeRecord(0, None, 0, 0)
        self.cached = self.states = 0

    def begin(self, asker: Asker | None = None) -> RequestRecord:
        """Begin a request, which ``asker`` sent."""
        clock = self.clock
        return RequestRecord(clock.begin(), clock.in_seconds, asker)

    # -- matched -----------------------------------------------------------------------------

    def use(self, path: list[NodeRecord], request: RequestRecord | None, *, again: bool = True) -> None:
        """A walk matched these records, parents first; the host has counted it in ``clock.accesses``.

        Each record counts one use per request.

        Args:
            path: The records.
            request: The request that walked; None if this is not a use, as when a waiting request's prefix is
                kept recent.
            again: Records that the request had used before are touched; False only refreshes them, as by a
                server that looks up a waiting request many times.
        """
        if self._watch is not None:
            self._watch.start()
        clock = self.clock
        recency = clock.accesses
        if request is None:
            for record in path:
                record.recency = recency
                self.refresh(record)
            return
        use, touch, now, counted = self._use, self._touch, clock.now, request.counted
        asker = request.asker
        if asker is not None:
            for record in path:
                record.used_by = asker
        if use is None and touch is None and again:  # nobody listens, as under LRU: a loop without questions
            for record in path:
                record.recency = recency
                end = record.depth + record.tokens
                if end > counted:
                    record.uses += 1
                    record.last_use = now
                    counted = end
        else:
            for record in path:
                record.recency = recency
                end = record.depth + record.tokens
                if end > counted:
                    record.uses += 1
                    record.last_use = now
                    counted = end
                    if use is not None:
                        try:
                            use(record)
                        except BaseException as error:
                            self._failed("use", error)
                            use, touch = self._use, self._touch
                elif not again:
                    self.refresh(record)
                    use, touch = self._use, self._touch  # in case that failed
                    continue
                if touch is not None:
                    try:
                        touch(record)
                    except BaseException as error:
                        self._failed("touch", error)
                        use, touch = self._use, self._touch
        if path:
            request.counted = counted
            if not self.lower_tier:
                self._reach(request, path[-1])

    def _reach(self, request: RequestRecord, record: NodeRecord) -> None:
        """Record a request's end: the deepest node that it used or made and that is still cached."""
        last = request.end
        if last is None or last.parent is None or record.depth + record.tokens >= last.depth + last.tokens:
            request.end = record

    def refresh(self, record: NodeRecord) -> None:
        """The recency or the priority of a record changed without a use; the host has set it."""
        handler = self._refresh
        if handler is not None:
            try:
                handler(record)
            except BaseException as error:
                self._failed("refresh", error)

    def raise_priority(self, record: NodeRecord, priority: int) -> None:
        """Give a record and its ancestors this priority if theirs is lower."""
        current = record
        while current.parent is not None:
            if current.priority < priority:
                current.priority = priority
                self.refresh(current)
            current = current.parent

    # -- made --------------------------------------------------------------------------------

    def insert(
        self,
        record: NodeRecord,
        request: RequestRecord | None = None,
        *,
        priority: int = 0,
        history: NodeRecord | None = None,
        locks: int = 0,
    ) -> None:
        """A node was cached, as a leaf.

        Args:
            record: Its new record, with tokens, depth, and the record of its parent; None stands for the
                root.
            request: The request that made it.
            priority: The request's priority.
            history: Record of the same tokens on another tier, or of the same prefix before; the new record
                continues its history.
            locks: 1 if the node is made under a lock.
        """
        clock = self.clock
        parent = record.parent
        if parent is None:
            parent = record.parent = self.root
        self._serial = record.serial = serial = self._serial + 1
        self.live[serial] = record
        parent.live_children += 1
        self.cached += record.tokens
        record.locks = locks
        if history is None:
            record.uses = 1
            record.last_use = clock.now
            record.recency = record.created = clock.accesses
            record.priority = priority
            if request is not None:
                record.creator = request.number
                record.made_by = record.used_by = request.asker
                end = record.depth + record.tokens
                request.counted = max(request.counted, end)
        else:
            record.inherit(history)
            record.priority = max(priority, history.priority)
            self.inherit(record, history)
        if request is not None and not self.lower_tier:
            self._reach(request, record)
        handler = self._insert
        if handler is not None:
            try:
                handler(record)
            except BaseException as error:
                self._failed("insert", error)

    def inherit(self, record: NodeRecord, history: NodeRecord) -> None:
        """Let the order take over what is known of another record, on this or another tier.

        Part of :meth:`insert`. Also for a record that is in the pool, whose copy on the faster tier is about
        to be evicted; for one that is about to be inserted, of tokens after the other's; and for one that is
        never inserted, but stands for the other one, as its history, once that has been evicted.
        """
        handler = self._inherit
        if handler is not None:
            try:
                handler(record, history)
            except BaseException as error:
                self._failed("inherit", error)

    def split(
        self, prefix: NodeRecord, tail: NodeRecord, *, locked: bool | None = None, flat: bool = False
    ) -> None:
        """The first tokens of a node became a node of their own.

        Args:
            prefix: The new record, with the depth and the tokens that it takes.
            tail: The record of the node, which keeps its identity, its state and its pins.
            locked: Whether the prefix is locked; as the tail is by default.
            flat: Both stay leaves under the root, as all records of a flat pool do.
        """
        parent, tokens = tail.parent, prefix.tokens
        self._serial = prefix.serial = serial = self._serial + 1
        self.live[serial] = prefix
        prefix.parent = parent
        prefix.inherit(tail)
        prefix.locks = int(tail.locks > 0 if locked is None else locked)
        if flat or self.flat:
            self.root.live_children += 1
            if tail.pins and not prefix.locks:
                self.pinned -= tokens
        else:
            tail.parent = prefix
            prefix.live_children = 1
        tail.depth += tokens
        tail.tokens -= tokens
        handler = self._split
        if handler is not None:
            try:
                handler(prefix, tail)
            except BaseException as error:
                self._failed("split", error)

    @property
    def merges(self) -> bool:
        """Whether the order can have nodes merged; if not, :meth:`merge` must not be called."""
        return self._merge is not None

    def merge(self, prefix: NodeRecord, tail: NodeRecord, *, flat: bool = False) -> None:
        """The only child of a node takes its tokens over: a split undone.

        Both must be equally recent, or else the tail would be made more recent or less.

        Args:
            prefix: The record of the node, which leaves the cache; it has no pins of its own and no state.
            tail: The record of its child, which keeps its identity, its state, its pins and its history, but
                counts the uses of the prefix from now on.
            flat: Both are leaves under the root, as all records of a flat pool are. Both are locked, or
                neither is.
        """
        if flat or self.flat:
            self.root.live_children -= 1
            if prefix.locks:  # the lock of the tail holds its tokens from now on
                self.root.locks -= 1
                prefix.pins = 0
        else:
            tail.parent = prefix.parent
        tail.depth = prefix.depth
        tail.tokens += prefix.tokens
        tail.uses = max(tail.uses, prefix.uses)
        del self.live[prefix.serial]
        prefix.parent = None
        prefix.live_children = prefix.locks = 0
        handler = self._merge
        if handler is not None:
            try:
                handler(prefix, tail)
            except BaseException as error:
                self._failed("merge", error)

    def move(self, record: NodeRecord, parent: NodeRecord) -> None:
        """A node follows another one from now on.

        For a host that keeps several copies of one prefix, or what follows tokens that are not cached: the
        prefix of the node does not change, but the record that stands for it.
        """
        before = record.parent
        if before is None or before is parent:
            return
        locked = record.locks > 0
        if locked:  # a locked record holds one lock on its parent: of the new one first
            self.pin(parent)
            parent.pins -= 1
        parent.live_children += 1
        before.live_children -= 1
        record.parent = parent
        if locked:
            before.pins += 1
            self.unpin(before)
        elif not before.locks and before.parent is not None:
            self._unlocked(before)

    # -- freed -------------------------------------------------------------------------------

    def trim(self, record: NodeRecord, tokens: int) -> None:
        """The last ``tokens`` tokens of a victim were freed, but not all."""
        record.tokens -= tokens
        self.cached -= tokens
        handler = self._trim
        if handler is not None:
            try:
                handler(record, tokens)
            except BaseException as error:
                self._failed("trim", error)

    def remove(self, record: NodeRecord) -> None:
        """A node, and the state at its end, left the cache."""
        parent = record.parent
        if parent is not None:
            parent.live_children -= 1
        del self.live[record.serial]
        self.cached -= record.tokens
        state = record.state
        if state is not None:
            self.states -= 1
        handler = self._remove
        if handler is not None:
            try:
                handler(record)
            except BaseException as error:
                self._failed("remove", error)
        record.parent = record.state = None

    # -- states ------------------------------------------------------------------------------

    def attach(self, record: NodeRecord, state: State) -> None:
        """A state was kept at the end of a node; pins on the node itself lock the state too."""
        record.state = state
        self.states += 1
        kept: Any = state
        if kept.locks:
            self.pinned_states += 1
        handler = self._attach
        if handler is not None:
            try:
                handler(record)
            except BaseException as error:
                self._failed("attach", error)

    def detach(self, record: NodeRecord) -> None:
        """The state of a node was freed, and the node stays: a tombstone."""
        state: Any = record.state
        record.state = None
        if state is not None:
            self.states -= 1
            if state.locks:
                self.pinned_states -= 1
        handler = self._detach
        if handler is not None:
            try:
                handler(record)
            except BaseException as error:
                self._failed("detach", error)

    def consume(self, record: NodeRecord, *, counts: bool = True) -> None:
        """A request resumes from the state of a node.

        Args:
            record: A record with a state.
            counts: Count a use; False if the same request did so before.
        """
        state, clock = record.state, self.clock
        if state is None:
            raise ValueError(f"{record!r} has no state to resume from")
        state.recency = clock.accesses
        if counts:
            state.uses += 1
            state.last_use = clock.now
        handler = self._consume
        if handler is not None:
            try:
                handler(record)
            except BaseException as error:
                self._failed("consume", error)
