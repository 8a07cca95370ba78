"""The results of evictions: what one freed and why, counts for metrics, and how a host refuses a victim."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

__all__ = ["USES", "Eviction", "EvictionCounters", "Freed", "Refused", "class_of_uses"]

USES: Final = ("1", "2", "3-4", "5-8", "9-16", "17+")
"""Classes of nodes by the requests that used them, each twice as often as the one before."""
_TOP: Final = 5


def class_of_uses(uses: int) -> int:
    """Index in :data:`USES` of a node that ``uses`` requests used, the one that made it included."""
    return min((uses - 1).bit_length(), _TOP) if uses > 1 else 0


class Refused(Enum):
    """The reason a host did not free a victim."""

    NOT_NOW = "not now"
    """The host cannot free the victim for the moment."""
    LOCKED = "locked"
    """The victim is locked."""
    NOT_A_LEAF = "not a leaf"
    """No order may name this record: it is not an evictable node of the cache."""


class Freed(NamedTuple):
    """One victim of an eviction.

    Attributes:
        serial: The node's number in order of creation.
        start: First evicted token of the prefix.
        tokens: Units freed.
        trimmed: True if only the tail of the node was evicted.
        uses: Requests that had used the node.
        recency: The node's last touch, as a count of accesses.
    """

    serial: int
    start: int
    tokens: int
    trimmed: bool
    uses: int
    recency: int


@dataclass(slots=True)
class Eviction:
    """One eviction: its shortfall, its goal and its victims.

    Attributes:
        pool: Name of the pool.
        policy: Name of the policy that chose the victims.
        shortfall: Units that were asked for.
        headroom: Units added by the free target.
        goal: Units that the pool set out to free: the adjusted count, at most what was evictable.
        freed: Units freed.
        slots: The freed slots, int64 of shape [freed], if the cache that evicted has slots.
    """

    pool: str
    policy: str
    shortfall: int
    headroom: int
    goal: int
    freed: int = 0
    slots: Any = None
    # Plain tuples: most evictions are never looked at, and this is the hot path.
    _victims: list[tuple[int, int, int, bool, int, int]] = field(default_factory=list)

    @property
    def victims(self) -> list[Freed]:
        """The victims, in the order of eviction."""
        return [Freed._make(victim) for victim in self._victims]

    @property
    def trimmed(self) -> int:
        """Victims evicted in part, from the tail."""
        return sum(victim[3] for victim in self._victims)

    def explain(self) -> str:
        """Describe the eviction in one line of plain words."""
        why = f"shortfall {self.shortfall}"
        if self.headroom:
            why += f" + headroom {self.headroom}"
        if self.goal != self.shortfall + self.headroom:
            why += f", adjusted to {self.goal}"
        return (
            f"freed {self.freed} of pool {self.pool!r} for {why}: "
            f"{len(self._victims)} victims by {self.policy!r}, {self.trimmed} trimmed"
        )


@dataclass(slots=True)
class EvictionCounters:
    """Counts of one pool since it was made, for metrics.

    Attributes:
        evictions: Evictions that had a shortfall.
        shortfall: Units asked for.
        evicted: Units freed.
        victims: Nodes evicted, whole or in part.
        trimmed: Victims evicted in part, from the tail.
        deferred: Victims that could not be freed when named.
        clamped: Answers of a plugin that were out of bounds and were replaced.
        short: Evictions that freed less than their shortfall, because no more was evictable.
        oversized: Requests longer than the whole pool.
        slow: Decisions and walks for which a plugin's policy took longer than its time budget.
        resets: Times that all was dropped at once, and something was cached.
        by_uses: The victims by class, see :data:`USES`.
    """

    evictions: int = 0
    shortfall: int = 0
    evicted: int = 0
    victims: int = 0
    trimmed: int = 0
    deferred: int = 0
    clamped: int = 0
    short: int = 0
    oversized: int = 0
    slow: int = 0
    resets: int = 0
    by_uses: list[int] = field(default_factory=lambda: [0] * len(USES))
