"""The device of a server with tiers: prompts are cached on it, and what it evicts is demoted.

Models with states: a state is at the end of a prompt, and where prompts were found to branch. One order
ranks KV and states, as in :class:`costcache.radix.states.StateTree`: a state is evicted with the last extent
before it, or alone if others follow, and KV after the last state goes before any state does. A state that a
longer one of its own session supersedes is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.tiers.ahead import MOST_AHEAD, NEED_KEEPS

if TYPE_CHECKING:
    from costcache.records import RequestRecord
    from costcache.sim.tiers.demotion import Demotion
    from costcache.sim.tiers.lower import LowerTiers
    from costcache.sim.tiers.tier import ExtentRecord
    from costcache.sim.tiers.times import Times

__all__ = ["Device"]


class Device:
    """The device: the tier on which prompts are computed.

    Attributes:
        tier: Its pool and extents.
        evicted: Bytes evicted from it.
    """

    def __init__(self, lower: LowerTiers, demotion: Demotion, times: Times) -> None:
        """Make the device above these tiers.

        Args:
            lower: The tiers below it.
            demotion: What happens to what it evicts.
            times: The server's times.
        """
        self.tier = lower.device
        self.tier.evicts, self.tier.evicts_state = self._evict, self._evict_state
        self.evicted = 0
        self._lower, self._demotion, self._times = lower, demotion, times
        self._need = 0.0  # bytes of a request that were not on the device, about the most of late

    def match(self, path: list[int]) -> int:
        """How many extents of a prompt the device has, from the first one on."""
        records, here = self.tier.records, 0
        while here < len(path) and path[here] in records:
            here += 1
        return here

    # -- room for running requests -----------------------------------------------------------

    def fits(self, path: list[int], here: int, tokens: int, running: int) -> bool:
        """Whether a request fits beside those that run.

        Args:
            path: The extents of its prompt.
            here: How many of them the device has.
            tokens: Tokens that it needs room for, those on the device included.
            running: Requests that run.
        """
        tier = self.tier
        while here and not tier.records[path[here - 1]].locks:
            here -= 1
        needed = (tokens - tier.of.prefix(path, here)) * tier.token_bytes
        in_use = tier.pool.pinned * tier.token_bytes + tier.reserved
        # Each request has a state; the others can be evicted.
        states = (running + 1) * tier.state_bytes
        return in_use + needed + states <= tier.capacity

    def reserve(self, tokens: int) -> int:
        """Keep room for tokens in no extent; returns the bytes, fewer if the device is full."""
        tier = self.tier
        size = tokens * tier.token_bytes
        if not tier.make_room(size):
            size = max(0, tier.capacity - tier.used - tier.reserved)
        tier.reserved += size
        return size

    def make_ahead(self, tokens: int) -> None:
        """Make room for the next request while one is computed of which so many tokens were not here.

        At most as large a part of the device as in :mod:`costcache.tiers.ahead`, and a state. What is below
        already can wait: nobody would wait for its eviction, and a request may want it still.
        """
        tier, pool = self.tier, self.tier.pool
        # A request leaves a state too, if the model has them.
        self._need = max(self._need * NEED_KEEPS, float(tokens * tier.token_bytes + tier.state_bytes))
        room = min(int(self._need), tier.capacity // MOST_AHEAD + tier.state_bytes)
        while tier.capacity - tier.used - tier.reserved < room:
            victim = pool.next_victim({})
            if victim is None:
                return
            pool.defer(victim)
            record: Any = victim.record
            below = self._lower.tiers[0].held(record.extent)
            if below is not None and below.has_state >= record.has_state:
                return
            if not pool.evict(1, watermark=False).freed:
                return

    # -- what is cached ----------------------------------------------------------------------

    def cache(
        self, path: list[int], here: int, end: int, requests: list[RequestRecord], *, branch: bool
    ) -> list[ExtentRecord]:
        """Cache a prompt as far as it fits; returns its records.

        Args:
            path: Its extents.
            here: How many of them the device has.
            end: How many of them need not be computed; a load brings the state at its end.
            requests: The request's record, of each tier.
            branch: Whether prompts branch where what the device has ends.
        """
        tier, pool, has_states = self.tier, self.tier.pool, self.tier.has_states
        doubles = self._lower.doubles
        records = [tier.records[extent] for extent in path[:here]]
        if records:
            pool.pin(records[-1])
        if has_states and 0 < end <= here:
            self._give_state(records[end - 1])  # a load may bring no more than that
        if branch:
            self._give_state(records[-1])
        for at in range(here, len(path)):
            extent = path[at]
            # A state is at the prompt's end, and where a load resumes.
            state = has_states and at in (len(path) - 1, end - 1)
            if not tier.make_room(tier.size(extent, state)):
                break
            record = tier.track(extent, requests[0])
            tier.hold(record, state)
            if records:
                pool.unpin(records[-1])
            pool.pin(record)
            records.append(record)
            self._lower.track(extent, requests[1:], state=state)
            if doubles is not None and self._lower.tiers[0].held(extent):
                doubles.add(extent, self._times.now)
        if records:
            last = records[-1]
            if has_states and len(records) == len(path):
                self._give_state(last)
            self._supersede(records)
            pool.unpin(last)
        return records

    def _give_state(self, record: ExtentRecord) -> None:
        """Keep a state at the end of an extent, if there is room."""
        if record.has_state or not self.tier.make_room(self.tier.state_bytes):
            return
        self.tier.give_state(record, True)
        self._lower.track_state(record.extent)

    def _supersede(self, records: list[ExtentRecord]) -> None:
        """Drop the state before a new one, unless other prompts branch there."""
        if not self.tier.has_states or not records[-1].has_state:
            return
        for record in reversed(records[:-1]):
            if record.live_children > 1:
                return
            if record.has_state:
                self.tier.give_state(record, False)
                self._lower.forget_state(record.extent)
                return

    # -- what is evicted ---------------------------------------------------------------------

    def _evict(self, record: ExtentRecord) -> None:
        """An extent is evicted: write it down first, or drop it."""
        times, doubles = self._times, self._lower.doubles
        self.evicted += self.tier.size(record.extent, record.has_state)
        if doubles is not None:
            doubles.evicted(record.extent, max(0.0, times.now - record.since))
        times.written = max(times.written, self._demotion.leave(record))

    def _evict_state(self, record: ExtentRecord) -> None:
        """A state is evicted alone."""
        times = self._times
        self.evicted += self.tier.state_bytes
        times.written = max(times.written, self._demotion.leave_state(record))
        self._lower.forget_state(record.extent)
