"""A pool: the records of one kind of memory, the order that ranks them, and the evictions from it.

A host owns the memory and its structure. It tells the pool what was matched (:meth:`Pool.use`), made
(:meth:`Pool.insert`), pinned (:meth:`Pool.pin`) and freed (:meth:`Pool.trim`, :meth:`Pool.remove`), and asks
it to evict so many units (:meth:`Pool.evict`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsIndex

from costcache.errors import PluginError
from costcache.eviction import Eviction, Refused, class_of_uses
from costcache.guard import HookGuard
from costcache.orders import VictimOrder
from costcache.policies.keyed import LRU
from costcache.pool.ranked import checked_chance
from costcache.pool.tree import RecordTree
from costcache.records import Action, Clock, NodeRecord, PoolState, RequestRecord, Victim, tuple_maker

__all__ = ["Pool"]

_DELETE: Final = Action.DELETE
_pool_state: Final = tuple_maker(PoolState)


class Pool(RecordTree):
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
        "_counts_tokens",
        "_dropped",
        "_hooks",
        "_make_order",
        "_measure",
        "book",
        "capacity",
        "name",
        "page_size",
        "request",
        "reserved",
        "state_units",
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
        super().__init__(
            Clock() if clock is None else clock,
            hooks.counters,
            flat=flat,
            lower_tier=lower_tier,
            time_budget=time_budget,
            drops_slow=drops_slow,
        )
        self.name = name
        self.unit = unit
        self.page_size = page_size
        self.capacity = capacity
        self.token_units = token_units
        self.state_units = state_units
        self.reserved = 0
        self.take = take
        self.book: Pool = self
        self._make_order = make_order
        self._hooks = hooks
        self._measure = measure
        self._also = tuple(also)
        self._counts_tokens = token_units == 1 and not state_units
        self._dropped = 0
        self._forget()
        for other in also:
            other.book = self
        if make_order is not None:
            self._start()

    def _forget(self) -> None:
        super()._forget()
        self.request: RequestRecord | None = None

    def _start(self) -> None:
        if self._make_order is not None:
            self.rank_by(*self._make_order((self.state(), *(pool.state() for pool in self._also))))

    def over_tier(self) -> None:
        """From now on a slower tier takes what is evicted from this pool, which must be empty.

        A pool that was used begins anew: what its order learned was the price of recomputing.
        """
        self._over_tier = True
        if self._serial and self._make_order is not None:
            self._start()
        else:
            self._tell_over_tier()

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
                chance = checked_chance(order.reuse_chance(record, within))
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
            return checked_chance(order.ghost_chance(name, within))
        except BaseException as error:
            book._failed("ghost_chance", error)
            return None

    # -- slower tiers ------------------------------------------------------------------------

    def order_below(self, pool: PoolState) -> tuple[str, VictimOrder] | None:
        """Make an order for a slower tier that shares what this pool's order has learned.

        Args:
            pool: The pool of that tier.

        Returns:
            The policy's name and the order; LRU if the order of this pool was dropped for it. None if the
            policy has no such order, and that tier needs one of its own.
        """
        guard = self.book._guard
        if guard.fallbacks:
            return "lru", LRU()
        order: Any = guard.order
        try:
            below = order.below(pool)
            if below is not None and not isinstance(below, VictimOrder):
                raise PluginError(f"below returned {below!r}: return a VictimOrder or None")
            if below is not None and below._in_use:
                raise PluginError(
                    f"below returned a {type(below).__name__} by which a pool ranks already: make a new "
                    "order for each tier"
                )
        except BaseException as error:
            self.book._failed("below", error)
            return "lru", LRU()
        return None if below is None else (guard.name, below)

    def rank_anew(self) -> None:
        """Start the policy afresh with the records that are here.

        For a slower tier whose order was made by another pool's (:meth:`order_below`) that is no longer in
        force: what it shared is gone.
        """
        self._dropped += self._guard.fallbacks
        self._start()
        order: Any = self._guard.order
        try:
            order.load(self.records())
        except BaseException as error:
            self._failed("load", error)

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
        book, take, goal, freed = self.book, self.take, eviction.goal, 0
        guard, states = book._guard, book is not self
        victims, trims, by_uses = eviction._victims, 0, self.counters.by_uses
        deferred: dict[int, Victim] = {}
        locked = False
        while freed < goal:
            victim = book._ask(self.name, deferred, goal - freed, locked, states)
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
        book = self.book
        return book._ask(self.name, deferred, 0, False, book is not self)

    def defer(self, victim: Victim) -> None:
        """A victim was not evicted; the order may name it again from now on."""
        book = self.book
        handler = book._defer
        if handler is not None:
            try:
                handler(victim)
            except BaseException as error:
                book._failed("defer", error)
