"""The eviction pipeline: shortfall, headroom, adjusted count, victims.

The pipeline guards every plugin's answer. What it frees is never under
min(shortfall, evictable) and never over what is evictable.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, SupportsIndex

from costcache.guard import OrderGuard
from costcache.records import Action, PoolState, Victim

__all__ = [
    "LOCKED",
    "NOT_A_LEAF",
    "NOT_NOW",
    "Eviction",
    "EvictionCounters",
    "EvictionHost",
    "EvictionPipeline",
    "Freed",
]

logger = logging.getLogger("costcache")

_DELETE = Action.DELETE
NOT_NOW = 0
LOCKED = -1
NOT_A_LEAF = -2


class EvictionHost(Protocol):
    """The cache that an eviction frees from."""

    def pool_state(self, pool: str) -> PoolState:
        """The pool as it is now."""

    def take(self, victim: Victim, needed: int) -> int:
        """Free a victim, or as little of its tail as ``needed`` asks for.

        Returns:
            Units freed; or :data:`NOT_NOW` for a victim that the host itself holds back,
            :data:`LOCKED` for a locked one, :data:`NOT_A_LEAF` for one that no order may name.
        """


class Freed(NamedTuple):
    """One victim of an eviction.

    Attributes:
        serial: The node's number in order of creation.
        start: First token of the prefix that went.
        tokens: Units freed.
        trimmed: True when only the tail of the node went.
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
    """What one eviction freed, and why.

    Attributes:
        pool: Name of the pool.
        policy: Name of the policy that chose the victims.
        shortfall: Units that were asked for.
        headroom: Units added by the free target.
        goal: Units that the pipeline set out to free: the adjusted count, at most what was evictable.
        freed: Units freed.
        slots: The freed slots, int64 of shape [freed], where the cache that evicted has slots.
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
        """Each victim, in the order of going."""
        return [Freed._make(victim) for victim in self._victims]

    @property
    def trimmed(self) -> int:
        """Victims of which only the tail went."""
        return sum(victim[3] for victim in self._victims)

    def explain(self) -> str:
        """The eviction in one line of plain words."""
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
    """Counts since the start, for metrics.

    Attributes:
        evictions: Evictions that had a shortfall.
        shortfall: Units asked for.
        evicted: Units freed.
        victims: Nodes that went, whole or in part.
        trimmed: Victims of which only the tail went.
        deferred: Victims that could not be taken when named.
        clamped: Answers of a plugin that were out of bounds and were replaced.
        short: Evictions that freed less than their shortfall, because no more was evictable.
    """

    evictions: int = 0
    shortfall: int = 0
    evicted: int = 0
    victims: int = 0
    trimmed: int = 0
    deferred: int = 0
    clamped: int = 0
    short: int = 0


class EvictionPipeline:
    """Runs evictions of one pool of one cache."""

    def __init__(
        self,
        host: EvictionHost,
        guard: OrderGuard,
        free_target: Callable[[PoolState], Any],
        adjust: Callable[[PoolState, int], Any],
        *,
        plugin: str,
        pool: str = "kv",
        counters: EvictionCounters | None = None,
    ) -> None:
        """Bind the parts once; nothing is looked up while serving.

        Args:
            host: The cache.
            guard: The guarded victim order.
            free_target: The architecture plugin's free target, bound to model and settings.
            adjust: Its adjusted count, bound likewise.
            plugin: The architecture plugin's name, for messages.
            pool: Name of the pool.
            counters: Counts to add to; new ones by default.
        """
        self.host = host
        self.guard = guard
        self.pool = pool
        self.counters = counters if counters is not None else EvictionCounters()
        self._free_target = free_target
        self._adjust = adjust
        self._plugin = plugin
        self._reported: set[str] = set()

    def reserve(self) -> int:
        """Units that the free target leaves free, as the pool is now."""
        return self._headroom(self.host.pool_state(self.pool))

    def evict(self, shortfall: SupportsIndex, *, watermark: bool = True) -> Eviction:
        """Free at least ``shortfall`` units, or all that is evictable if that is less.

        Args:
            shortfall: Units needed beyond those that are free. Nothing happens at 0 or below.
            watermark: Also free up to the free target, as serving does.
        """
        state = self.host.pool_state(self.pool)
        missing = operator.index(shortfall)  # a server's counts may be numpy's
        if missing <= 0:
            return Eviction(self.pool, self.guard.name, 0, 0, 0)
        headroom = self._headroom(state) if watermark else 0
        requested = missing + headroom
        goal = min(self._adjusted(state, requested), state.evictable)
        eviction = Eviction(self.pool, self.guard.name, missing, headroom, goal)
        if goal > 0:
            self._free(eviction)
        counters = self.counters
        counters.evictions += 1
        counters.shortfall += missing
        counters.evicted += eviction.freed
        if eviction.freed < missing:
            counters.short += 1
        return eviction

    def _free(self, eviction: Eviction) -> None:
        guard, take, goal, pool, freed = self.guard, self.host.take, eviction.goal, self.pool, 0
        victims, trims = eviction._victims, 0
        deferred: dict[int, Victim] = {}
        locked = False
        while freed < goal:
            victim = guard.next_victim(pool)
            if victim is None:
                if guard.fell_back or not self._left_out(deferred, locked):
                    break
                guard.drop(f"it named no victim although {goal - freed} more units can go")
                continue
            record, action, _ = victim
            if deferred and record.serial in deferred:
                if guard.fell_back:
                    break
                guard.drop(f"it named node #{record.serial} again, which could not go in this eviction")
                continue
            end, uses, recency = record.depth + record.tokens, record.uses, record.recency
            got = take(victim, goal - freed)
            if got > 0:
                freed += got
                trimmed = action is _DELETE and record.parent is not None
                trims += trimmed
                victims.append((record.serial, end - got, got, trimmed, uses, recency))
            elif got == NOT_A_LEAF:
                guard.drop(f"it named node #{record.serial}, which is not a leaf of this cache")
            else:
                locked |= got == LOCKED
                deferred[record.serial] = victim
        eviction.freed = freed
        eviction.policy = guard.name
        self.counters.victims += len(victims)
        self.counters.trimmed += trims
        if deferred:
            self.counters.deferred += len(deferred)
            if guard.defer is not None:
                for victim in deferred.values():
                    guard.defer(victim)

    def _left_out(self, deferred: dict[int, Victim], locked: bool) -> bool:
        """Whether an order that names nothing more has left out a node that could go."""
        if not deferred:
            return True  # evictable units are left, and nothing stood in the way
        # Only an order that names locked nodes is suspect: then it is worth a look at all of them.
        return locked and any(r.is_evictable and r.serial not in deferred for r in self.guard.records())

    def _headroom(self, state: PoolState) -> int:
        try:
            share = self._free_target(state)
        except Exception as error:
            self._replaced("free_target", "raised", "0", error)
            return 0
        if isinstance(share, (float, int)) and not share:
            return 0  # the usual answer
        if isinstance(share, float) and 0.0 <= (plain := float(share)) < 1.0:  # numpy's are floats, too
            return math.ceil(plain * state.capacity)
        self._replaced(
            "free_target", f"answered {reprlib.repr(share)}, not a share from 0.0 to below 1.0", "0"
        )
        return 0

    def _adjusted(self, state: PoolState, requested: int) -> int:
        """The plugin's count, or the request itself where that is out of bounds; in whole pages."""
        requested = state.in_pages(requested)
        try:
            count = self._adjust(state, requested)
        except Exception as error:
            self._replaced("adjust_eviction_count", "raised", "the request itself", error)
            return requested
        if type(count) is not int:
            with contextlib.suppress(Exception):  # numpy's integers are welcome, True is not
                count = -1 if isinstance(count, bool) else operator.index(count)
        if type(count) is int and (count == requested or requested < count <= state.capacity):
            return count if count == requested else state.in_pages(count)
        self._replaced(
            "adjust_eviction_count",
            f"answered {reprlib.repr(count)}, not an int from {requested} (requested) "
            f"to {state.capacity} (capacity)",
            "the request itself",
        )
        return requested

    def _replaced(self, hook: str, what: str, by: str, error: Exception | None = None) -> None:
        self.counters.clamped += 1
        if hook not in self._reported:
            self._reported.add(hook)
            logger.error(
                "plugin %r: %s %s; it counts as %s (logged once)",
                self._plugin,
                hook,
                what,
                by,
                exc_info=error,
            )
