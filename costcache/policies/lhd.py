"""Least hit density: evicts nodes with the fewest expected hits for the space and time that they take."""

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
"""The last bin: nodes of this age are evicted first."""
EXPLORERS = 32
"""One in this many nodes that are created or used may become an explorer."""
CLASSES = AGES.bit_length() + 1
"""Classes of nodes, by their last two reuse intervals."""
DECAY = 0.9
"""Factor by which each new estimate discounts the past."""
HEAVY = 1e60
"""Weight of an event at which all are scaled down, long before floats overflow."""
CROWDED = 0.01
"""Share of the events in the last bin above which the bins are doubled in width."""


class LHDSettings(BaseModel):
    """Settings of ``lhd``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int = Field(32, ge=1, description="Leaves that are sampled and compared for each victim.")
    refresh: int = Field(1024, ge=1, description="Uses and victims between estimates of the densities.")
    explore: float = Field(
        0.01,
        ge=0.0,
        le=1.0,
        description="Share of the pool for explorers: nodes that are kept to learn their reuse.",
    )
    seed: int = Field(0, ge=0, description="Seed of the draws; the same on every rank.")


class Aged:
    """LHD's history of a node, kept in ``record.data``.

    Attributes:
        record: The node.
        used: Access at which the node was last used.
        group: Its class.
        last: The last reuse interval in bins; the longest possible before the first reuse.
        index: Its index in the list of leaves, -1 outside.
        explores: Whether it is an explorer, kept to learn about ages that other nodes do not reach.
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
    """Evicts the leaf with the lowest hit density of some that are sampled at random.

    The density of a class at an age is the expected number of hits over the expected time until the next
    hit or the eviction, given that neither has happened yet. Both are estimated from the hits and evictions
    observed at each age, with older ones discounted. Classes are powers of two of the sum of a node's last
    two reuse intervals.

    Source: N. Beckmann, H. Chen and A. Cidon, "LHD: improving cache hit rate by maximizing hit density",
    NSDI 2018. Parameters: ``samples`` for each victim; how often the estimate is renewed, for which the paper
    counts on millions of requests; and the share of the pool for explorers, nodes that are kept whatever
    their density, to observe the reuse that evictions censor.

    Departures: a node is a bundle of equal objects, its tokens, which are counted one by one and evicted from
    its tail, so a density is not divided by a size; time is walks of the cache; ages are 256 bins, which only
    ever get coarser; only unlocked leaves are sampled, and all of them if there are fewer than ``samples``;
    draws come from a seeded generator, so that all ranks draw the same; there are no classes by application.
    There are no ghosts: explorers and evictions stand in for the reuse of evicted nodes. A victim costs
    O(samples).
    """

    def __init__(
        self, capacity: int, samples: int = 32, refresh: int = 1024, explore: float = 0.01, seed: int = 0
    ) -> None:
        self._budget = capacity * explore
        self._samples, self._refresh = samples, refresh
        self._draw = random.Random(seed).random
        self._leaves: list[Aged] = []  # and stale ones, dropped when they are sampled
        self._named: Aged | None = None
        self._now = 0
        self._events = 0
        self._shift = 0
        self._weight = 1.0
        self._hits = [[0.0] * AGES for _ in range(CLASSES)]
        self._evictions = [[0.0] * AGES for _ in range(CLASSES)]
        # Before the first estimate: as LRU, with more for nodes that were reused sooner.
        self._density = [[(group + 1.0) / (age + 1) for age in range(AGES)] for group in range(CLASSES)]

    # -- events ------------------------------------------------------------------------------

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
        entry: Aged = record.data
        age = self._age(entry)
        self._hits[entry.group][age] += record.tokens * self._weight
        entry.used = record.recency
        entry.group, entry.last = group_of(age + entry.last), age
        self._explore(record)
        self._event()

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        entry: Aged = tail.data
        prefix.data = Aged(prefix, entry.used, entry.group, entry.last)
        prefix.data.explores = entry.explores

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        entry: Aged = prefix.data
        rest: Aged = tail.data
        # A split undone: both have one history, that of the prefix, whose uses the tail has from now on.
        rest.used, rest.group, rest.last = entry.used, entry.group, entry.last
        if entry.explores != rest.explores:  # the one that does is an explorer no longer
            self._budget += prefix.tokens if entry.explores else tail.tokens - prefix.tokens
            rest.explores = False
        self._drop(entry)
        prefix.data = None

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
        if self._named is not None:  # not evicted
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
            for entry in stale:  # others are sampled instead
                self._drop(entry)
        if best is None:
            return None
        self._named = best
        return Victim(best.record)

    def _least(
        self, drawn: list[Aged], best: Aged | None, least: float
    ) -> tuple[Aged | None, float, list[Aged]]:
        """Pick the least dense of ``best`` and the drawn leaves.

        Returns:
            The leaf, its density, and the drawn leaves that would have replaced it but are not evictable.
        """
        density, now, shift = self._density, self._now, self._shift
        stale: list[Aged] = []
        for entry in drawn:
            age = now - entry.used >> shift
            worth = density[entry.group][age] + entry.explores if age < OLD else -1.0
            if worth < least or (worth == least and (best is None or entry.used < best.used)):
                if entry.record.live_children or entry.record.locks:
                    stale.append(entry)
                else:
                    best, least = entry, worth
        return best, least, stale

    def _add(self, record: NodeRecord) -> None:
        entry: Aged = record.data
        if record.is_evictable and entry.index < 0:
            entry.index = len(self._leaves)
            self._leaves.append(entry)

    def _drop(self, entry: Aged) -> None:
        index = entry.index
        if index >= 0:
            entry.index = -1
            last = self._leaves.pop()
            if last is not entry:
                self._leaves[index] = last
                last.index = index

    # -- densities ---------------------------------------------------------------------------

    def _age(self, entry: Aged) -> int:
        return min(self._now - entry.used >> self._shift, AGES - 1)

    def _explore(self, record: NodeRecord) -> None:
        """Now and then, make a node an explorer."""
        entry: Aged = record.data
        if entry.explores:
            self._budget += record.tokens
        entry.explores = record.tokens <= self._budget and self._draw() * EXPLORERS < 1.0
        if entry.explores:
            self._budget -= record.tokens

    def _evicted(self, record: NodeRecord, tokens: int) -> None:
        self._named = None
        entry: Aged = record.data
        if entry.explores:
            self._budget += tokens
        self._evictions[entry.group][self._age(entry)] += tokens * self._weight
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
            # Weigh later events more: the same as discounting all past ones.
            self._weight /= DECAY
            if self._weight > HEAVY:
                for row in self._hits + self._evictions:
                    row[:] = [count / self._weight for count in row]
                self._weight = 1.0

    def _coarsen(self) -> None:
        """Double the width of the bins if too many events fall in the last one."""
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
    """Hit density at each age: remaining hits over the time until they or evictions happen."""
    remaining = list(accumulate(reversed(hits)))
    ended = accumulate(reversed(evictions))
    events = [hit + evicted for hit, evicted in zip(remaining, ended, strict=True)]
    time = accumulate(events)
    density = [
        hit / spent if event else 0.0 for hit, event, spent in zip(remaining, events, time, strict=True)
    ]
    density.reverse()
    return density


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "lhd": PolicySpec(
            lambda cost, pools, settings: LHD(
                pools[0].capacity, settings.samples, settings.refresh, settings.explore, settings.seed
            ),
            "Lowest hit density (expected hits per token and time) of a few sampled leaves.",
            LHDSettings,
        )
    }
