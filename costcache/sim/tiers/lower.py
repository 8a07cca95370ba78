"""The tiers below a device: what they hold, and what they track of the tiers above them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from costcache.sim.tiers.doubles import Doubles, Spare
from costcache.sim.tiers.links import Links
from costcache.sim.tiers.outcome import Moved
from costcache.sim.tiers.tier import ExtentRecord, Tier

if TYPE_CHECKING:
    from costcache.binding import Binding
    from costcache.records import RequestRecord
    from costcache.sim.tiers.times import Times

__all__ = ["Below", "LowerTiers"]


@dataclass(frozen=True)
class Below:
    """A tier below the device.

    Attributes:
        name: ``host`` or ``disk``.
        capacity: Bytes of one rank.
        bytes_per_second: Speed of its link to the tier above, in each direction.
        latency: Seconds that each transfer takes besides.
    """

    name: str
    capacity: int
    bytes_per_second: float
    latency: float = 0.0


class LowerTiers:
    """The tiers below a device, from the fastest down: those of a *level* of 0, 1 and so on.

    Attributes:
        device: The device's tier.
        names: The tiers' names.
        tiers: The tiers.
        moved: What each did.
        links: What connects them.
        doubles: What the device and host memory both have; None if no copies are given up.
    """

    def __init__(
        self, binding: Binding, below: list[Below], device: Tier, times: Times, *, gives_up: bool
    ) -> None:
        """Make empty tiers.

        Args:
            binding: The model, the policy and its settings.
            below: The tiers, from the fastest down.
            device: The device.
            times: The server's times.
            gives_up: Whether host memory gives up copies of what the device has had for long.
        """
        self.device = device
        self._times = times
        if below:
            device.pool.over_tier()
        self.names = [each.name for each in below]
        self.tiers = [
            Tier(binding, device.of, each.capacity, device.token_bytes, device.state_bytes, device)
            for each in below
        ]
        self.moved = [Moved() for _ in below]
        self.links = Links(below, self.moved, times)
        self.doubles: Doubles | None = None
        if self.tiers and gives_up:
            self.doubles = Doubles()
            self.tiers[0].spare = Spare(self.doubles, device, self.tiers[0], self.moved[0], times).give_up

    def follow(self) -> None:
        """Rank by the order in force on the device."""
        for tier in self.tiers:
            tier.follow()

    def level(self, extent: int) -> int | None:
        """The fastest tier that holds an extent; None if none does."""
        return next((level for level, tier in enumerate(self.tiers) if tier.held(extent)), None)

    def state_level(self, extent: int) -> int | None:
        """The fastest tier that has a state at the end of an extent; None if none does."""
        for level, tier in enumerate(self.tiers):
            held = tier.held(extent)
            if held is not None and held.has_state:
                return level
        return None

    # -- what the tiers above have -----------------------------------------------------------

    def track(
        self, extent: int, requests: list[RequestRecord], *, state: bool, after: ExtentRecord | None = None
    ) -> None:
        """Track an extent that the device, or the request itself, has.

        Args:
            extent: The extent.
            requests: The request's record, of each tier.
            state: Whether a state is at its end.
            after: Whose uses it inherits.
        """
        for tier, request in zip(self.tiers, requests, strict=True):
            copy = tier.records.get(extent) or tier.track(extent, request)
            if not copy.pins:
                tier.pool.pin(copy)
            if after is not None:
                tier.pool.inherit(copy, after)
            if state:
                tier.track_state(copy, True)

    def track_state(self, extent: int) -> None:
        """Track a state that the device got."""
        for tier in self.tiers:
            tier.track_state(tier.records[extent], True)

    def forget_state(self, extent: int) -> None:
        """Forget a state that the device dropped, on each tier that has none, nor has one between."""
        kept = False
        for tier in self.tiers:
            copy = tier.records[extent]
            kept |= copy.has_state
            tier.track_state(copy, kept)

    # -- writes ------------------------------------------------------------------------------

    def write(self, copy: ExtentRecord, level: int, has_state: bool) -> float:
        """Write an extent to a tier, if there is room; returns when it is there, now if there is none."""
        tier = self.tiers[level]
        size = tier.size(copy.extent, has_state)
        if not self._make_room(level, size):
            return self._times.now
        tier.hold(copy, has_state)
        return self._sent(level, size)

    def write_state(self, copy: ExtentRecord, level: int) -> float:
        """Write the state of an extent that a tier holds without one, as :meth:`write` does."""
        tier = self.tiers[level]
        if not self._make_room(level, tier.state_bytes):
            return self._times.now
        tier.give_state(copy, True)
        return self._sent(level, tier.state_bytes)

    def _make_room(self, level: int, size: int) -> bool:
        found = self.tiers[level].make_room(size)
        if not found:
            self.moved[level].refused += size
        return found

    def _sent(self, level: int, size: int) -> float:
        moved = self.moved[level]
        moved.peak = max(moved.peak, self.tiers[level].used)
        return self.links.write(level, size)
