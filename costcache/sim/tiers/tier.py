"""One tier of a replay: its pool, and the extents that it holds, or tracks for the tiers above it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from costcache.eviction import Refused
from costcache.policies.states import make_state_order
from costcache.records import Action, NodeRecord, PoolState, RequestRecord, State, Victim
from costcache.sim.tiers.extents import ROOT, Extents
from costcache.tiers import Price
from costcache.tiers.shared import SharedForecast

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.binding import Binding
    from costcache.orders import VictimOrder
    from costcache.pool import Pool

__all__ = ["ExtentRecord", "Tier"]


class ExtentRecord(NodeRecord):
    """An extent in the pool of a tier.

    Attributes:
        extent: Its number.
        held: Whether the tier holds it. A tier below the device also tracks, pinned, what only the tiers
            above it hold: so its order knows the history of what it is given, and forecasts for all of them.
        has_state: Whether it ends with a state here. A tier below also tracks those of the tiers above, as
            ``record.state``.
        since: When the tier got it, in seconds.
    """

    __slots__ = ("extent", "has_state", "held", "since")

    def __init__(self, extent: int, parent: ExtentRecord | None, of: Extents) -> None:
        super().__init__(0, parent, of.tokens[extent], of.depths[extent])
        self.extent = extent
        self.held = self.has_state = False
        self.since = 0.0

    def prefix_hash(self, offset: int = 0) -> int | None:
        """The extent's number: the same prefix has the same, on every tier."""
        return None if offset else self.extent + 1


def _ignore(record: ExtentRecord) -> None:
    """What is evicted is lost, unless somebody takes it in."""


class Tier:
    """One tier: its pool, and the extents that it holds or tracks.

    Attributes:
        has_states: Whether the model has states.
        records: Its records, by extent.
        used: Bytes of those that it holds.
        reserved: Bytes in use besides.
        price: What room in it costs.
        stays: Seconds that what was evicted lately had stayed.
        evicts: Called with each extent that is evicted, before it is dropped.
        evicts_state: Called with each extent whose state is evicted alone, before that is dropped.
        spare: Gives up a copy that is of no use now, if there is one; returns whether it did.
    """

    def __init__(
        self,
        binding: Binding,
        of: Extents,
        capacity: int,
        token_bytes: int,
        state_bytes: int,
        device: Tier | None = None,
    ) -> None:
        self.of, self.capacity = of, capacity
        self.token_bytes, self.state_bytes = token_bytes, state_bytes
        self.has_states = bool(state_bytes)
        self.records: dict[int, ExtentRecord] = {}
        self.used = self.reserved = 0
        self.price = Price()
        self.stays = math.inf
        self.evicts: Callable[[ExtentRecord], None] = _ignore
        self.evicts_state: Callable[[ExtentRecord], None] = _ignore
        self.spare: Callable[[], bool] | None = None
        self._orphans: dict[int, list[ExtentRecord]] = {}
        self.name = "memory" if state_bytes else "kv"
        # Of states each tier learns by itself: it hears of every request, and of all that is above it.
        self._shared = None if device is None or state_bytes else SharedForecast(device.pool)

        def make_order(pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
            if not state_bytes:  # then orders count tokens
                pools = (PoolState("kv", "tokens", capacity // token_bytes, 0, 0, 0, binding.page_size),)
            made = None if self._shared is None else self._shared.make(pools[0])
            if made is not None:
                return made
            name, order = binding.make_order(pools)
            return name, make_state_order(order) if state_bytes else order

        self.pool: Pool = binding.pool(
            self.name,
            self._take,
            unit="bytes",
            capacity=capacity,
            token_units=token_bytes,
            state_units=state_bytes,
            measure=self._state,
            make_order=make_order,
            clock=None if device is None else device.pool.clock,
        )

    def follow(self) -> None:
        """Rank by the order in force on the device, if the tier's shared the forecast of another one."""
        if self._shared is not None:
            self._shared.follow(self.pool)

    def held(self, extent: int) -> ExtentRecord | None:
        """The record of an extent that the tier holds; None for others."""
        record = self.records.get(extent)
        return record if record is not None and record.held else None

    def use(self, path: list[int], request: RequestRecord) -> None:
        """A request uses those of these extents that the tier holds or tracks."""
        known: list[NodeRecord] = [self.records[each] for each in path if each in self.records]
        self.pool.use(known, request)

    def resume(self, extent: int) -> None:
        """A request resumes from the state at the end of an extent, if the tier knows of it."""
        record = self.records.get(extent)
        if record is not None and record.state is not None:
            self.pool.consume(record)

    def size(self, extent: int, has_state: bool) -> int:
        """Bytes of an extent."""
        return self.of.tokens[extent] * self.token_bytes + has_state * self.state_bytes

    def _state(self) -> PoolState:
        evictable = 0
        if self.records:
            pool = self.pool
            evictable = (pool.cached - pool.pinned) * self.token_bytes
            evictable += (pool.states - pool.pinned_states) * self.state_bytes
        free = self.capacity - self.used - self.reserved
        return PoolState(self.name, "bytes", self.capacity, free, evictable, self.reserved, 1)

    def _take(self, victim: Victim, needed: int) -> int | Refused:  # noqa: ARG002 # extents are evicted whole
        record: Any = victim.record
        if victim.action is Action.TOMBSTONE and record.live_children and record.state is not None:
            if record.state.locks:
                return Refused.LOCKED
            self.evicts_state(record)
            self.give_state(record, False)
            return self.state_bytes
        if record.parent is None or record.live_children:
            return Refused.NOT_A_LEAF
        if record.locks:
            return Refused.LOCKED
        size = self.size(record.extent, record.has_state)
        self.evicts(record)
        self.drop(record)
        return size

    def track(self, extent: int, request: RequestRecord | None) -> ExtentRecord:
        """Track an extent; it takes no room until it is held."""
        above = self.of.parents[extent]
        parent = self.records.get(above)
        record = ExtentRecord(extent, parent, self.of)
        if parent is None and above != ROOT:
            self._orphans.setdefault(above, []).append(record)
        self.records[extent] = record
        self.pool.insert(record, request)
        for child in self._orphans.pop(extent, ()):
            self.pool.move(child, record)
        return record

    def hold(self, record: ExtentRecord, has_state: bool) -> None:
        """Hold an extent from now on; there is room for it."""
        record.held = True
        record.since = self.pool.clock.now
        self.used += self.size(record.extent, False)
        if has_state:
            self.give_state(record, True)

    def drop(self, record: ExtentRecord) -> None:
        """Forget an unlocked extent. What follows it stays, unreachable until it is back."""
        above = self.of.parents[record.extent]
        if record.live_children:
            orphans = [child for child in self.pool.live.values() if child.parent is record]
            for child in orphans:
                self.pool.move(child, self.pool.root)
            self._orphans[record.extent] = orphans  # type: ignore[assignment] # all of its records are extents
        if record.held:
            self.used -= self.size(record.extent, record.has_state)
        if record.parent is self.pool.root and above != ROOT:
            self._orphans[above].remove(record)
        del self.records[record.extent]
        self.pool.remove(record)

    def give_state(self, record: ExtentRecord, has_state: bool) -> None:
        """Attach a state to the end of an extent that the tier holds, or drop it."""
        self.used += (has_state - record.has_state) * self.state_bytes
        record.has_state = has_state
        self.track_state(record, has_state)

    def track_state(self, record: ExtentRecord, has_state: bool) -> None:
        """Tell the order that the tier, or one above it, has a state at the end of an extent, or none has."""
        if not has_state and record.state is not None:
            self.pool.detach(record)
        elif has_state and record.state is None:
            state = State(0, self.pool.clock)
            state.locks = record.pins
            self.pool.attach(record, state)

    def make_room(self, size: int) -> bool:
        """Evict until ``size`` bytes are free; returns whether they are."""
        while (missing := self.used + self.reserved + size - self.capacity) > 0:
            if self.spare is not None and self.spare():
                continue
            if not self.pool.evict(missing, watermark=False).freed:
                return False
        return True

    def give_up(self, record: ExtentRecord) -> None:
        """Stop holding an extent that a tier above has, and its state; it is tracked as before."""
        self.used -= self.size(record.extent, record.has_state)
        record.held = record.has_state = False
