"""The times of a server that its tiers go by."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Times"]


@dataclass(slots=True)
class Times:
    """Times in seconds, of the request that is served.

    Attributes:
        now: What is moved now is moved at this time.
        early: From when on evictions write; before ``now`` if room is made while others are computed.
        written: When the writes that evictions wait for are over.
    """

    now: float = 0.0
    early: float = 0.0
    written: float = 0.0
