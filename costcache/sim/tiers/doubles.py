"""Copies in host memory of what the device has too, and which of them the host gives up."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from costcache.sim.tiers.outcome import Moved
    from costcache.sim.tiers.tier import Tier
    from costcache.sim.tiers.times import Times

__all__ = ["Doubles", "Spare"]

_KEEPS: Final = 0.98
"""Share of its weight that the average stay keeps at each eviction."""
_SPENT: Final = 0.5
"""Share of the bytes saved that may be spent on writing again what the host gave up."""


class Doubles:
    """Extents that are on the device and in host memory, those longest on the device first.

    A copy below of what the device has is of no use until the device evicts it. While it is given up, its
    room keeps something else; the price is one more write. So it pays for what stays on the device for long,
    and what has outstayed most evictions is likely to stay for as long again.

    Attributes:
        stays: Seconds for which what the device evicted lately had been there.
        saved: Bytes that were evicted from the device and not written, since they were not worth it.
    """

    __slots__ = ("_since", "saved", "stays")

    def __init__(self) -> None:
        """Start without extents."""
        self.stays = math.inf
        self.saved = 0
        self._since: OrderedDict[int, float] = OrderedDict()  # whose first entry is found at once

    def add(self, extent: int, now: float) -> None:
        """The device got an extent, in seconds, of which the host has a copy."""
        self._since[extent] = now

    def remove(self, extent: int) -> None:
        """Forget an extent, if it is known."""
        self._since.pop(extent, None)

    def evicted(self, extent: int, stayed: float) -> None:
        """The device evicts any extent, which it had for so many seconds."""
        self._since.pop(extent, None)
        self.stays = stayed if self.stays == math.inf else self.stays * _KEEPS + stayed * (1 - _KEEPS)

    def first(self, now: float) -> int | None:
        """The extent whose copy should be given up first; None if none has been on the device for long."""
        for extent, since in self._since.items():
            return extent if now - since > self.stays else None
        return None


class Spare:
    """Gives up copies of what has been on the device for long, if they may be written again."""

    def __init__(self, doubles: Doubles, device: Tier, host: Tier, moved: Moved, times: Times) -> None:
        """Give up copies of these doubles.

        Args:
            doubles: What both tiers have.
            device: The device.
            host: Host memory.
            moved: Where the bytes that the host gives up are counted.
            times: The server's times.
        """
        self._doubles, self._device, self._host = doubles, device, host
        self._moved, self._times = moved, times

    def give_up(self) -> bool:
        """Give up one copy; returns whether there was one."""
        doubles, host, moved = self._doubles, self._host, self._moved
        while (extent := doubles.first(self._times.now)) is not None:
            copy, above = host.records[extent], self._device.records[extent]
            if copy.held and copy.has_state <= above.has_state:
                size = host.size(extent, copy.has_state)
                if moved.given_up + size > _SPENT * (doubles.saved + self._not_loaded()):
                    return False
                host.give_up(copy)
                moved.given_up += size
                doubles.remove(extent)
                return True
            doubles.remove(extent)
        return False

    def _not_loaded(self) -> int:
        """Bytes that were not loaded since the device found more than it would have found under LRU."""
        verdict = self._device.pool.order.against_lru()
        return 0 if verdict is None else max(0, verdict.gained - verdict.lost) * self._device.token_bytes
