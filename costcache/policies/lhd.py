"""Least hit density: what promises the fewest hits for the space and time that it takes goes first."""

from __future__ import annotations

import math
import random
from itertools import accumulate, repeat

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.orders import VictimOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["LHD", "LHDSettings"]

AGES = 256
"""Bins of age."""
OLD = AGES - 1
"""The last bin: what is as old goes first."""
EXPLORERS = 32
"""Of so many nodes that are made or used, one may become an explorer."""
CLASSES = AGES.bit_length() + 1
"""Classes of nodes, by their last two reuse intervals."""
DECAY = 0.9
"""What counts of the past at each new estimate."""
HEAVY = 1e60
"""Weight of an event at which all are scaled down, long before a float is full."""
CROWDED = 0.01
"""Share of the events in the last bin from which ages are binned twice as coarsely."""


class LHDSettings(BaseModel):
    """Settings of ``lhd``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int = Field(32, ge=1, description="Leaves that are drawn and compared for each victim.")
    refresh: int = Field(1024, ge=1, description="Uses and victims after which densities are estimated anew.")
    explore: float = Field(
        0.01, ge=0.0, le=1.0, description="Share of the pool for nodes that are kept to learn how they fare."
    )
    seed: int = Field(0, ge=0, description="Seed of the draws; the same on every rank.")


class Aged:
    """What LHD knows of a node, kept in ``record.data``.

    Attributes:
        record: The node.
        used: Access at which the node was last used.
        group: Its class.
        last: The last reuse interval in bins; as long as can be before the first reuse.
        index: Its place in the list of leaves, -1 outside.
        explores: It is kept to learn what comes later than others get.
    """

    __slots__ = ("explores", "group", "index", "last", "record", "used")

    def __init__(self, record: NodeRecord, used: int, group: int, last: int) -> None:
        self.record = record
        self.used = used
        self.group = group
        self.last = last
        self.index = -1
        self.explores = False


class LHD(VictimOrder):
    """Of some leaves drawn at random, the one with the lowest hit density goes.

    The density of a class at an age is the expected number of hits over the expected time until the next
    hit or the eviction, given that neither has happened yet. Both come from the hits and evictions that
    were seen at each age, and older ones count less. Classes are powers of two of the sum of a node's last
    two reuse intervals.

    Source: N. Beckmann, H. Chen and A. Cidon, "LHD: improving cache hit rate by maximizing hit density",
    NSDI 2018. Parameters: ``samples`` drawn for each victim; how often the estimate is renewed, for which the
    paper counts on millions of requests; and the share of the pool for explorers, nodes that are kept
    whatever is expected of them, so that it is seen what others would have become.

    Departures: a node is a bundle of equal objects, its tokens, which are counted one by one and go from its
    tail, so a density is not divided by a size; time is walks of the cache; ages are 256 bins, which only
    ever get coarser; only unlocked leaves are drawn, and all of them when there are fewer than
    ``samples``; draws come from a seeded generator, so that all ranks draw the same; there are no classes by
    application. No ghosts: explorers and evictions tell of what others do not live to see. A victim costs
    O(samples).
    """

    def __init__(
        self, capacity: int, samples: int = 32, refresh: int = 1024, explore: float = 0.01, seed: int = 0
    ) -> None:
        self._budget = capacity * explore
        self._samples, self._refresh = samples, refresh
        self._draw = random.Random(seed).random
        self._leaves: list[Aged] = []  # and some that are none any more, dropped when they are met
        self._named: Aged | None = None
        self._now = 0
        self._events = 0
        self._shift = 0
        self._weight = 1.0
        self._hits = [[0.0] * AGES for _ in range(CLASSES)]
        self._evictions = [[0.0] * AGES for _ in range(CLASSES)]
        # Until something is known: as LRU, and what was reused sooner is worth more.
        self._density = [[(group + 1.0) / (age + 1) for age in range(AGES)] for group in range(CLASSES)]

    # -- what happens ------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        self._now = max(self._now, record.recency)
        record.data = Aged(record, record.recency, 0, AGES)
        self._explore(record)
        self._add(record)
        self._event()

    def touch(self, record: NodeRecord) -> None:
        self._now = record.recency

    def use(self, record: NodeRecord) -> None:
        self._now = record.recency
        known: Aged = record.data
        age = self._age(known)
        self._hits[known.group][age] += record.tokens * self._weight
        known.used = record.recency
        known.group, known.last = group_of(age + known.last), age
        self._explore(record)
        self._event()

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        known: Aged = tail.data
        prefix.data = Aged(prefix, known.used, known.group, known.last)
        prefix.data.explores = known.explores

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._evicted(record, tokens)

    def remove(self, record: NodeRecord) -> None:
        self._evicted(record, record.tokens)
        self._drop(record.data)
        record.data = None
        if record.parent is not None:
            self._add(record.parent)

    def unlock(self, record: NodeRecord) -> None:
        self._add(record)

    def defer(self, victim: Victim) -> None:
        self._named = None
        self._add(victim.record)

    # -- victims -----------------------------------------------------------------------------

    def next_victim(self, pool: str) -> Victim | None:
        if self._named is not None:  # it was not taken
            self._drop(self._named)
            self._named = None
        leaves, draw, left = self._leaves, self._draw, self._samples
        best: Aged | None = None
        least = math.inf
        while leaves:
            size = len(leaves)
            drawn = leaves[:] if size <= left else [leaves[int(draw() * size)] for _ in repeat(None, left)]
            best, least, stale = self._least(drawn, best, least)
            left = len(stale)
            if not left:
                break
            for known in stale:  # others are drawn for them
                self._drop(known)
        if best is None:
            return None
        self._named = best
        return Victim(best.record)

    def _least(
        self, drawn: list[Aged], best: Aged | None, least: float
    ) -> tuple[Aged | None, float, list[Aged]]:
        """The least dense of ``best`` and drawn leaves, its density, and what would be it but may not go."""
        density, now, shift = self._density, self._now, self._shift
        stale: list[Aged] = []
        for known in drawn:
            age = now - known.used >> shift
            worth = density[known.group][age] + known.explores if age < OLD else -1.0
            if worth < least or (worth == least and (best is None or known.used < best.used)):
                if known.record.live_children or known.record.locks:
                    stale.append(known)
                else:
                    best, least = known, worth
        return best, least, stale

    def _add(self, record: NodeRecord) -> None:
        known: Aged = record.data
        if record.is_evictable and known.index < 0:
            known.index = len(self._leaves)
            self._leaves.append(known)

    def _drop(self, known: Aged) -> None:
        index = known.index
        if index >= 0:
            known.index = -1
            last = self._leaves.pop()
            if last is not known:
                self._leaves[index] = last
                last.index = index

    # -- what is expected --------------------------------------------------------------------

    def _age(self, known: Aged) -> int:
        return min(self._now - known.used >> self._shift, AGES - 1)

    def _explore(self, record: NodeRecord) -> None:
        """Now and then, keep a node whatever is expected of it."""
        known: Aged = record.data
        if known.explores:
            self._budget += record.tokens
        known.explores = record.tokens <= self._budget and self._draw() * EXPLORERS < 1.0
        if known.explores:
            self._budget -= record.tokens

    def _evicted(self, record: NodeRecord, tokens: int) -> None:
        self._named = None
        known: Aged = record.data
        if known.explores:
            self._budget += tokens
        self._evictions[known.group][self._age(known)] += tokens * self._weight
        self._event()

    def _event(self) -> None:
        self._events += 1
        if self._events >= self._refresh:
            self._events = 0
            self._coarsen()
            self._density = [
                densities(hits, evictions)
                for hits, evictions in zip(self._hits, self._evictions, strict=True)
            ]
            # The past counts less when what is to come counts more.
            self._weight /= DECAY
            if self._weight > HEAVY:
                for row in self._hits + self._evictions:
                    row[:] = [count / self._weight for count in row]
                self._weight = 1.0

    def _coarsen(self) -> None:
        """Double the width of the bins when too much happens in the last one."""
        rows = self._hits + self._evictions
        total = sum(sum(row) for row in rows)
        if sum(row[-1] for row in rows) > CROWDED * total:
            self._shift += 1
            for row in rows:
                row[:] = [row[age] + row[age + 1] for age in range(0, AGES, 2)] + [0.0] * (AGES // 2)


def group_of(interval: int) -> int:
    """The class of nodes whose last two reuse intervals add up to ``interval`` bins: 0 for the longest."""
    return CLASSES - 1 - min(interval, AGES).bit_length()


def densities(hits: list[float], evictions: list[float]) -> list[float]:
    """Hit density at each age: hits still to come, over the time until they or evictions come."""
    to_come = list(accumulate(reversed(hits)))
    ended = accumulate(reversed(evictions))
    events = [hit + gone for hit, gone in zip(to_come, ended, strict=True)]
    time = accumulate(events)
    density = [hit / spent if event else 0.0 for hit, event, spent in zip(to_come, events, time, strict=True)]
    density.reverse()
    return density


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "lhd": PolicySpec(
            lambda cost, pools, settings: LHD(
                pools[0].capacity, settings.samples, settings.refresh, settings.explore, settings.seed
            ),
            "Fewest expected hits per token and time first, of a few drawn leaves.",
            LHDSettings,
        )
    }
