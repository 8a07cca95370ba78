"""Copies in host memory of what the device has too, and which of them the host gives up."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["Doubles"]

_KEEPS: Final = 0.98
"""Share of its weight that the average stay keeps at each eviction."""


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
        self._since: dict[int, float] = {}

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
