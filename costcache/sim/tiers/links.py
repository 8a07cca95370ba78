"""The links between a device and the tiers below it: one in each direction, each with a queue of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.tiers import Link

if TYPE_CHECKING:
    from costcache.sim.tiers.lower import Below
    from costcache.sim.tiers.outcome import Moved
    from costcache.sim.tiers.times import Times

__all__ = ["Links"]


class Links:
    """The links of each tier below the device to the tier above it; counts what passes them.

    Attributes:
        loading_seconds: Seconds that links were busy with loads.
    """

    def __init__(self, below: list[Below], moved: list[Moved], times: Times) -> None:
        """Make idle links.

        Args:
            below: The tiers, from the fastest down.
            moved: Where the bytes of each are counted.
            times: The server's times.
        """
        self.loading_seconds = 0.0
        self._down = [Link(each.bytes_per_second, each.latency) for each in below]
        self._up = [Link(each.bytes_per_second, each.latency) for each in below]
        self._moved, self._times = moved, times

    def write(self, level: int, size: int) -> float:
        """Write so many bytes to the tier at ``level``; returns when they are there."""
        self._moved[level].down += size
        return self._down[level].begin(size, self._times.early)

    def write_seconds(self, level: int, size: int) -> float:
        """Seconds that it would take now to write so many bytes to the tier at ``level``, queue included."""
        return self._down[level].seconds(size, self._times.now)

    def load(self, sizes: list[int], start: float) -> float:
        """Load so many bytes of each tier, from ``start`` on; returns when they are on the device."""
        until, through = start, 0
        for level in range(len(sizes) - 1, -1, -1):
            through += sizes[level]
            if through:
                link = self._up[level]
                self._moved[level].up += through
                self.loading_seconds += through / link.bytes_per_second
                until = max(until, link.begin(through, start))
        return until

    def load_seconds(self, sizes: list[int], *, queued: bool) -> float:
        """Seconds to load so many bytes of each tier; those of a lower one pass the links above it too.

        Args:
            sizes: Bytes by tier.
            queued: After what waits for the links now; False for a load at some other time.
        """
        took, through, now = 0.0, 0, self._times.now
        for level in range(len(sizes) - 1, -1, -1):
            through += sizes[level]
            seconds = self._up[level].seconds(through, now)
            took = max(took, seconds if queued else seconds - self._up[level].waits(now))
        return took
