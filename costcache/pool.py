"""A pool: the records of one kind of memory, the order that ranks them, and the evictions from it.

A host owns the memory and its structure. It tells the pool what was matched (:meth:`Pool.use`), made
(:meth:`Pool.insert`), pinned (:meth:`Pool.pin`) and freed (:meth:`Pool.trim`, :meth:`Pool.remove`), and asks
it to evict so many units (:meth:`Pool.evict`). Only this module sends events to an order.

Each event brings the records up to date first and then calls the order's handler, if it has one. A handler
that raises is dropped for LRU, which starts from the records.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsIndex

from costcache.errors import PluginError
from costcache.eviction import Eviction, EvictionCounters, Refused, class_of_uses
from costcache.guard import HookGuard, OrderGuard
from costcache.orders import VictimOrder, overridden
from costcache.records import (
    Action,
    Asker,
    Clock,
    NodeRecord,
    PoolState,
    RequestInfo,
    RequestRecord,
    State,
    Victim,
    tuple_maker,
)
from costcache.watch import Watch, is_ours

__all__ = ["Pool"]

_DELETE: Final = Action.DELETE
_pool_state: Final = tuple_maker(PoolState)


class Pool:
    """The records of one kind of memory, its order under guard, its evictions and its counters.

    Records form a tree through ``record.parent``. In a *flat* pool every record is a leaf under :attr:`root`:
    a value can be evicted whatever comes after it.

    One order may rank two kinds of memory, such as KV and the states at the ends of nodes. The pool of KV
    then has the records and the order, and the pool of states is made first and named in its ``also``; its
    :attr:`book` is the pool of KV.

    Attributes:
        reserved: Units that running requests own outside the cache; the host keeps this up to date.
        book: The pool that has the records and the order; itself unless it is named in another one's
            ``also``.
        root: Parent of the records that have no parent of their own.
        live: The records, by serial number, in order of creation.
        cached: Tokens of the records.
        pinned: Tokens of locked records, if the host pins with :meth:`pin`.
        states: States of the records.
        pinned_states: Those of them that are locked.
        request: The request on whose behalf the host walks, for hosts that walk in several steps; None if
            there is none.
        counters: Counts of the evictions.
    """

    __slots__ = (
        "_also",
        "_attach",
        "_consume",
        "_counts_tokens",
        "_defer",
        "_detach",
        "_dropped",
        "_drops_slow",
        "_finish",
        "_guard",
        "_hooks",
        "_inherit",
        "_insert",
        "_make_order",
        "_measure",
        "_merge",
        "_over_tier",
        "_refresh",
        "_remove",
        "_serial",
        "_split",
        "_time_budget",
        "_touch",
        "_trim",
        "_unlock",
        "_use",
        "_watch",
        "book",
        "cached",
        "capacity",
        "clock",
        "counters",
        "flat",
        "live",
        "lower_tier",
        "name",
        "page_size",
        "pinned",
        "pinned_states",
        "request",
        "reserved",
        "root",
        "state_units",
        "states",
        "take",
        "token_units",
        "unit",
    )

    def __init__(
        self,
        name: str,
        take: Callable[[Victim, int], int | Refused],
        make_order: Callable[[tuple[PoolState, ...]], tuple[str, Any]] | None,
        hooks: HookGuard,
        *,
        unit: str = "tokens",
        page_size: int = 1,
        capacity: int = 0,
        token_units: int = 1,
        state_units: int = 0,
        measure: Callable[[], PoolState] | None = None,
        clock: Clock | None = None,
        flat: bool = False,
        lower_tier: bool = False,
        also: Sequence[Pool] = (),
        time_budget: float = math.inf,
        drops_slow: bool = False,
    ) -> None:
        """Make an empty pool.

        Args:
            name: Name of the pool: ``"kv"``, ``"swa"``, ``"state"``, ``"host"`` or ``"memory"``.
            take: Frees a victim, or as little of its tail as ``take(victim, units)`` asks for; it calls
                :meth:`trim`, :meth:`remove` or :meth:`detach`. Returns the units freed, or why none were.
            make_order: Makes a new order from the state of this pool and of those in ``also``, and gives its
                name; None for a pool that another one names in its ``also``.
            hooks: The plugin's eviction hooks.
            unit: The unit of all counts: ``"tokens"``, ``"states"`` or ``"bytes"``.
            page_size: Tokens per page.
            capacity: Units that the pool has.
            token_units: Units of this pool that a cached token takes.
            state_units: Units that a cached state takes.
            measure: Gives the state of the pool, for a host that keeps the counts itself.
            clock: Logical time, shared by all pools of a cache; a new one by default.
            flat: Records are leaves under the root, whatever their depth.
            lower_tier: A copy of another pool's memory on a slower tier: requests end in that one.
            also: Pools whose memory is at the ends of this one's nodes, ranked by the same order.
            time_budget: Seconds that a plugin's order may take for one decision.
            drops_slow: Whether an order that is often slower is dropped; False only counts.
        """
        self.name = name
        self.unit = unit
        self.page_size = page_size
        self.capacity = capacity
        self.token_units = token_units
        self.state_units = state_units
        self.reserved = 0
        self.clock = Clock() if clock is None else clock
        self.take = take
        self.flat = flat
        self.lower_tier = lower_tier
        self.counters: EvictionCounters = hooks.counters
        self.book: Pool = self
        self._make_order = make_order
        self._time_budget = time_budget
        self._drops_slow = drops_slow
        self._watch: Watch | None = None
        self._hooks = hooks
        self._measure = measure
        self._also = tuple(also)
        self._counts_tokens = token_units == 1 and not state_units
        self._over_tier = False
        self._serial = 0
        self._dropped = 0
        self._guard: OrderGuard
        self._forget()
        for other in also:
            other.book = self
        if make_order is not None:
            self._start()

    def _forget(self) -> None:
        self.live: dict[int, NodeRecord] = {}
        self.root = NodeRecord(0, None, 0, 0)
        self.request: RequestRecord | None = None
        self.cached = self.pinned = self.states = self.pinned_states = 0

    def _start(self) -> None:
        if self._make_order is not None:
            self.rank_by(*self._make_order((self.state(), *(pool.state() for pool in self._also))))

    def rank_by(self, name: str, order: VictimOrder) -> None:
        """Evict by an order that was made elsewhere. The pool must be empty."""
        watch = None
        if not is_ours(order):
            watch = Watch(name, order, self._time_budget, self._drops_slow, self.counters)
            watch.seal()
        self._guard = OrderGuard(name, order, self.records, self._listen, watch)
        self._listen(order)
        if self._over_tier:
            self._tell_over_tier()

    def over_tier(self) -> None:
        """From now on a slower tier takes what is evicted from this pool, which must be empty.

        A pool that was used begins anew: what its order learned was the price of recomputing.
        """
        self._over_tier = True
        if self._serial and self._make_order is not None:
            self._start()
        else:
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

    def reset(self) -> None:
        """Forget all records and start the policy afresh; logical time, counters and capacity stay."""
        if self.book is not self:
            return  # follows the pool that has the records
        self._dropped += self._guard.fallbacks
        if self.live:
            self.counters.resets += 1
        for record in self.live.values():
            record.parent = None
            record.state = None
            record.live_children = record.locks = record.pins = 0
        self._forget()
        self._start()

    # -- facts -------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Name of the policy in force: ``"lru"`` after a fallback."""
        return self.book._guard.name

    @property
    def order(self) -> VictimOrder:
        """The order in force."""
        return self.book._guard.order

    @property
    def fell_back(self) -> bool:
        """Whether the order was dropped for LRU since the last reset."""
        return self.book._guard.fallbacks > 0

    @property
    def kept_entries(self) -> int | None:
        """Entries in the collections of a plugin's order, which should not grow for ever; None for others."""
        watch = self.book._guard.watch
        return None if watch is None else watch.entries

    @property
    def fallbacks(self) -> int:
        """Orders of this pool that were dropped for LRU since the start."""
        return self._dropped + self._guard.fallbacks if self.book is self else 0

    @property
    def used(self) -> int:
        """Units that the cache occupies."""
        book = self.book
        return book.cached * self.token_units + book.states * self.state_units

    @property
    def evictable(self) -> int:
        """Cached units that no lock protects: all of them can be evicted, leaf by leaf."""
        book = self.book
        return (book.cached - book.pinned) * self.token_units + (
            book.states - book.pinned_states
        ) * self.state_units

    @property
    def free(self) -> int:
        """Units neither cached nor reserved; below 0 if the host has reserved more than there are."""
        return self.capacity - self.used - self.reserved

    def state(self) -> PoolState:
        """The pool at this moment."""
        if self._measure is not None:
            return self._measure()
        capacity, reserved = self.capacity, self.reserved
        if self._counts_tokens:  # the usual pool, without the indirections: every eviction reads it
            used = self.cached
            evictable = used - self.pinned
        else:
            used, evictable = self.used, self.evictable
        free = capacity - used - reserved
        return _pool_state((self.name, self.unit, capacity, free, evictable, reserved, self.page_size))

    def records(self) -> list[NodeRecord]:
        """All records, in order of creation."""
        return list(self.live.values())

    # -- requests ----------------------------------------------------------------------------

    def begin(self, asker: Asker | None = None) -> RequestRecord:
        """Begin a request, which ``asker`` sent."""
        clock = self.clock
        return RequestRecord(clock.begin(), clock.in_seconds, asker)

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
            inherit = self._inherit
            if inherit is not None:
                try:
                    inherit(record, history)
                except BaseException as error:
                    self._failed("inherit", error)
        if request is not None and not self.lower_tier:
            self._reach(request, record)
        handler = self._insert
        if handler is not None:
            try:
                handler(record)
            except BaseException as error:
                self._failed("insert", error)

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

    # -- forecast ----------------------------------------------------------------------------

    def reuse_chance(self, record: NodeRecord, within: float = math.inf) -> float:
        """Chance, from 0 to 1, that a request uses a node again, as the order forecasts it.

        Args:
            record: A node of this pool; or one of another tier, of the same prefix, that this pool's order
                may remember. Of one that it does not know, the prior of
                :meth:`~costcache.orders.VictimOrder.reuse_chance` is returned.
            within: Time from now, in units of the clock; for ever by default.
        """
        book = self.book
        if book.live.get(record.serial) is not record:
            chance = self.ghost_chance(record, within)
        else:
            order: Any = book._guard.order
            try:
                chance = _chance(order.reuse_chance(record, within))
            except BaseException as error:
                book._failed("reuse_chance", error)
                chance = None
        return record.uses / (record.uses + 2.0) if chance is None else chance

    def ghost_chance(self, record: NodeRecord, within: float = math.inf) -> float | None:
        """The same of a node that was evicted from this pool, by its record on another tier.

        None if the order does not remember it.
        """
        book = self.book
        name = record.prefix_hash()
        if name is None:
            return None
        order: Any = book._guard.order
        try:
            return _chance(order.ghost_chance(name, within))
        except BaseException as error:
            book._failed("ghost_chance", error)
            return None

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

    # -- pinned ------------------------------------------------------------------------------

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

    # -- evictions ---------------------------------------------------------------------------

    def reserve(self) -> int:
        """Units that the free target leaves free, as the pool is now."""
        return self._hooks.headroom(self.state())

    def make_room(self, tokens: int, keep: NodeRecord, *, watermark: bool = True) -> int:
        """Make room in a pool of tokens for more of them.

        Args:
            tokens: Tokens to add, whole pages.
            keep: The record that the request matched: neither it nor its ancestors are evicted.
            watermark: Also free up to the free target, if anything has to be evicted.

        Returns:
            Tokens that fit, whole pages: all, unless the pool is too small or too much of it is locked or
            reserved.
        """
        shortfall = tokens - (self.capacity - self.cached - self.reserved)
        if shortfall > 0:
            self.evict(shortfall, watermark=watermark, keep=keep)
            free = self.capacity - self.cached - self.reserved
            if free < tokens:
                return free // self.page_size * self.page_size
        return tokens

    def evict(
        self, shortfall: SupportsIndex, *, watermark: bool = True, keep: NodeRecord | None = None
    ) -> Eviction:
        """Free at least ``shortfall`` units, or all that is evictable if that is less.

        Args:
            shortfall: Units needed beyond those that are free. Nothing happens at 0 or below.
            watermark: Also free up to the free target, as serving does.
            keep: A record that is not evicted, nor are its ancestors.
        """
        book, hooks = self.book, self._hooks
        missing = operator.index(shortfall)  # a server's counts may be numpy's
        if missing <= 0:
            return Eviction(self.name, book._guard.name, 0, 0, 0)
        if book._watch is not None:
            book._watch.start()
        briefly = keep is not None and book._pin_briefly(keep)
        state = self.state()
        headroom = hooks.headroom(state) if watermark else 0
        goal = min(hooks.adjusted(state, missing + headroom), state.evictable)
        eviction = Eviction(self.name, book._guard.name, missing, headroom, goal)
        if goal > 0:
            self._free_victims(eviction)
        if keep is not None:
            book._unpin_briefly(keep, briefly)
        counters = self.counters
        counters.evictions += 1
        counters.shortfall += missing
        counters.evicted += eviction.freed
        if eviction.freed < missing:
            counters.short += 1
        return eviction

    def _pin_briefly(self, record: NodeRecord) -> bool:
        """Pin a record for one eviction; returns whether its ancestors were left out.

        They need no walk if nothing else is pinned: as long as the record stays, they have a child.
        """
        if self.pinned or self.flat or record.parent is None or record.state is not None:
            self.pin(record)
            return False
        record.locks = 1
        self.pinned = record.depth + record.tokens
        return True

    def _unpin_briefly(self, record: NodeRecord, briefly: bool) -> None:
        if not briefly:
            self.unpin(record)
            return
        record.locks = 0
        self.pinned = 0
        self._unlocked(record)

    def _free_victims(self, eviction: Eviction) -> None:
        guard, take, goal, freed = self.book._guard, self.take, eviction.goal, 0
        victims, trims, by_uses = eviction._victims, 0, self.counters.by_uses
        deferred: dict[int, Victim] = {}
        locked = False
        while freed < goal:
            victim = self._ask(deferred, goal - freed, locked)
            if victim is None:
                break
            record, action, _ = victim
            end, uses, recency = record.depth + record.tokens, record.uses, record.recency
            got = take(victim, goal - freed)
            if type(got) is int and got > 0:
                freed += got
                trimmed = action is _DELETE and record.parent is not None
                trims += trimmed
                victims.append((record.serial, end - got, got, trimmed, uses, recency))
                by_uses[class_of_uses(uses)] += 1
            elif got is Refused.NOT_A_LEAF:
                guard.drop(f"it named node #{record.serial}, which is not a leaf of this cache")
            else:
                locked |= got is Refused.LOCKED
                deferred[record.serial] = victim
        eviction.freed = freed
        eviction.policy = guard.name
        counters = self.counters
        counters.victims += len(victims)
        counters.trimmed += trims
        if deferred:
            counters.deferred += len(deferred)
            for victim in deferred.values():
                self.defer(victim)

    def next_victim(self, deferred: dict[int, Victim]) -> Victim | None:
        """Ask the order for a victim, for a host whose own walk evicts it; :meth:`defer` those that stay.

        An order whose answer is none of this cache, or was deferred, or that misses a node is dropped, as in
        :meth:`evict`.

        Args:
            deferred: Victims that this walk could not evict, by serial number.
        """
        return self._ask(deferred, 0, False)

    def _ask(self, deferred: dict[int, Victim], short: int, locked: bool) -> Victim | None:
        """Ask the order for a victim until it names one that the host can be asked to free.

        Args:
            deferred: Victims of this eviction that could not be evicted, by serial number.
            short: Units that are missing still, all of them evictable; 0 if the host counts them.
            locked: Whether a victim turned out to be locked.

        Returns:
            None if no more can be evicted.
        """
        book = self.book
        guard, live, name = book._guard, book.live, self.name
        checks = not short or book._watch is not None
        passed: set[int] | None = None
        while True:
            victim = guard.next_victim(name)
            if victim is None:
                if guard.fallbacks:
                    return None
                missed = self._missed_a_node(deferred, locked) if short else self._leaves_any(deferred)
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

    def _leaves_any(self, deferred: dict[int, Victim]) -> bool:
        """Whether a record that the order may name is left; looks at all of them."""
        book = self.book
        if book is self:
            return any(r.is_evictable and r.serial not in deferred for r in book.live.values())
        for record in book.live.values():
            state: Any = record.state  # as in pin
            if state is not None and not state.locks and record.serial not in deferred:
                return True
        return False

    def defer(self, victim: Victim) -> None:
        """A victim was not evicted; the order may name it again from now on."""
        book = self.book
        handler = book._defer
        if handler is not None:
            try:
                handler(victim)
            except BaseException as error:
                book._failed("defer", error)

    def _missed_a_node(self, deferred: dict[int, Victim], locked: bool) -> bool:
        """Whether an order that names no more victims has missed an evictable node."""
        if not deferred:
            return True  # evictable units are left, and no victim was deferred
        # Only an order that named locked nodes is suspect; then a scan of all nodes is worth its time.
        return locked and any(r.is_evictable and r.serial not in deferred for r in self.book.live.values())


def _chance(answer: Any) -> float | None:
    """An order's forecast, checked."""
    if answer is not None and not 0.0 <= answer <= 1.0:
        raise PluginError(f"reuse_chance is {answer!r}: give a number from 0 to 1")
    return None if answer is None else float(answer)
