"""The outcome of a replay over tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Moved", "TieredOutcome"]


@dataclass
class Moved:
    """What a tier below the device did.

    Attributes:
        hits: Tokens that requests loaded from it.
        down: Bytes written to it.
        up: Bytes loaded from it.
        evicted: Bytes evicted from it.
        given_up: Bytes of copies that it gave up while the device had them.
        refused: Bytes that were to be written, and found no room.
        peak: Most bytes that it held.
    """

    hits: int = 0
    down: int = 0
    up: int = 0
    evicted: int = 0
    given_up: int = 0
    refused: int = 0
    peak: int = 0


@dataclass
class TieredOutcome:
    """The result of a replay.

    Attributes:
        device: Tokens that each request found on the device, int64 of shape [requests].
        loaded: Tokens that it loaded, likewise.
        ttft: Seconds from arrival to first token, queue included, float64 of shape [requests].
        reload_seconds: Seconds that links were busy with loads.
        recompute_seconds: Seconds of all prefills.
        write_wait_seconds: Seconds that requests waited for evictions to be written.
        memory_waits: Requests that waited, since they did not fit on the device beside those that ran.
        evicted: Bytes evicted from the device.
        tiers: What each tier below did, by name.
        seconds: Wall time of the replay.
        policy: Policy in force on the device at the end.
        fallbacks: Orders that failed and were replaced by LRU.
    """

    device: NDArray[np.int64]
    loaded: NDArray[np.int64]
    ttft: NDArray[np.float64]
    reload_seconds: float = 0.0
    recompute_seconds: float = 0.0
    write_wait_seconds: float = 0.0
    memory_waits: int = 0
    evicted: int = 0
    tiers: dict[str, Moved] = field(default_factory=dict)
    seconds: float = 0.0
    policy: str = ""
    fallbacks: int = 0
