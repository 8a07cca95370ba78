"""A link between two tiers: its measured speed, and the transfers that wait for it."""

from __future__ import annotations

import math

from costcache.errors import SettingsError

__all__ = ["Link"]

_MEMORY = 0.9
"""Share of its weight that what was measured before keeps at each transfer."""


class Link:
    """One direction of a link, which carries one transfer after another.

    The speed is a moving estimate: bytes over seconds of the transfers reported to :meth:`ended`, the older
    ones fading. Whoever reports none keeps the speed given. Ranks that must decide alike report the same
    transfers, or none.

    Attributes:
        bytes_per_second: The speed as estimated now.
        latency: Seconds that each transfer takes besides its bytes.
        outstanding: Bytes that have begun and have not been reported to have ended.
    """

    __slots__ = ("_bytes", "_free_at", "_seconds", "bytes_per_second", "latency", "outstanding")

    def __init__(self, bytes_per_second: float, latency: float = 0.0) -> None:
        """Make an idle link.

        Args:
            bytes_per_second: The speed until a transfer has been reported.
            latency: Seconds that each transfer takes besides its bytes.

        Raises:
            SettingsError: The speed is not a positive number, or the latency is negative.
        """
        if not 0.0 < bytes_per_second < math.inf:
            raise SettingsError(f"bytes_per_second is {bytes_per_second!r}: give a number above 0")
        if not 0.0 <= latency < math.inf:
            raise SettingsError(f"latency is {latency!r} seconds: give 0 or more")
        self.bytes_per_second = bytes_per_second
        self.latency = latency
        self.outstanding = 0
        self._free_at = 0.0
        # The speed given counts as one measured second.
        self._bytes, self._seconds = bytes_per_second, 1.0

    def waits(self, now: float) -> float:
        """Seconds until the transfers that have begun are over, as of ``now`` in seconds."""
        return max(0.0, self._free_at - now)

    def seconds(self, size: int, now: float) -> float:
        """Seconds from ``now`` until a transfer of ``size`` bytes would end, after its queue; 0 for none."""
        if not size:
            return 0.0
        return self.waits(now) + self.latency + size / self.bytes_per_second

    def begin(self, size: int, now: float) -> float:
        """Queue a transfer of ``size`` bytes; returns when it should be over, in seconds."""
        if not size:
            return now
        self._free_at = now + self.seconds(size, now)
        self.outstanding += size
        return self._free_at

    def ended(self, size: int, seconds: float, now: float) -> None:
        """A transfer of ``size`` bytes is over, which moved for ``seconds``; also one that was cancelled.

        Args:
            size: Bytes.
            seconds: Seconds from its first byte to its last, its latency included; 0 to learn nothing of it.
            now: The time.
        """
        self.outstanding = max(0, self.outstanding - size)
        moving = seconds - self.latency
        if size > 0 and moving > 0.0:
            self._bytes = self._bytes * _MEMORY + size
            self._seconds = self._seconds * _MEMORY + moving
            self.bytes_per_second = self._bytes / self._seconds
        rest = self.outstanding
        self._free_at = now + (self.latency + rest / self.bytes_per_second if rest else 0.0)
