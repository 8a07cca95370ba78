"""Orders for a slower tier that rank by what hazard has learned on the device: one forecast for both tiers.

What the device evicts and remembers is what the slower tier holds. So a node takes its class and its last use
along, and again whenever the device evicts it anew. What is learned of its class on the device, from all
requests, ranks it below as well, and says how likely it is to be used again. An order that learned from the
slower tier alone would see only the few uses that the device missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, ClassVar, Final

from costcache.orders import VictimOrder
from costcache.policies.hazard.history import Tracked
from costcache.records import Action, NodeRecord, Victim

if TYPE_CHECKING:
    from costcache.policies.hazard.order import Hazard
    from costcache.policies.hazard.states import HazardStates

__all__ = ["Below", "BelowHazard", "BelowHazardStates"]

_UNKNOWN: Final = -1
"""Stratum of what no request is known to want, such as KV that follows the last state."""
_LENGTHS: Final = 5
"""Bits of the stratum of a state that tell the power of two of its tokens."""
_SPARE: Final = 1024
"""Stale entries that are tolerated, besides as many as there are valid ones."""


class Entry:
    """What is known of a record.

    Attributes:
        stratum: Records of a stratum and an age are worth the same.
        last_use: Time of its last use, on the device or below.
        stamp: Number of its valid entry in the queue; 0 if it has none.
    """

    __slots__ = ("last_use", "stamp", "stratum")

    def __init__(self, stratum: int, last_use: float) -> None:
        self.stratum = stratum
        self.last_use = last_use
        self.stamp = 0


class Below(VictimOrder):
    """Evicts the record of the stratum that is worth least now, the least recently used one of it.

    In a flat pool every record may be a victim; in a tree a record gets its place when it becomes a leaf.

    Cost: O(log n) an event and a victim, and one look at each stratum that has records when a request has
    passed.
    """

    forecasts: ClassVar[bool] = True

    def __init__(self) -> None:
        self._queues: dict[int, list[tuple[float, int, NodeRecord]]] = {}
        self._entries = 0  # of all queues, stale ones included
        self._valid = 0  # those that are not
        self._ranked: list[tuple[float, int]] = []  # worth and stratum, as a heap
        self._ranked_at = -1
        self._stamp = 0
        self._named: Entry | None = None

    # -- for subclasses ----------------------------------------------------------------------

    def place(self, record: NodeRecord, history: NodeRecord | None) -> tuple[int, float]:
        """Stratum of a record, and the time of its last use."""
        raise NotImplementedError

    def reading(self) -> tuple[int, float]:
        """Requests so far, and the time."""
        raise NotImplementedError

    def just_now(self, record: NodeRecord) -> float:
        """The time of a record's last use, which was just now: the device may not have counted it yet."""
        return max(self.reading()[1], record.last_use)

    def worth(self, stratum: int, age: float) -> float:
        """Worth of a stratum at an age; the lowest is evicted first."""
        raise NotImplementedError

    def chance(self, stratum: int, last_use: float, within: float) -> float | None:
        """Chance of a use of a stratum within a time, by the time of its last use; None if not known."""
        raise NotImplementedError

    # -- events ------------------------------------------------------------------------------

    def inherit(self, record: NodeRecord, history: NodeRecord) -> None:
        entry: Entry | None = record.data
        if entry is None:
            record.data = Entry(*self.place(record, history))
        elif history.data is not None:
            entry.stratum, last_use = self.place(record, history)
            entry.last_use = max(entry.last_use, last_use)
            self._offer(record)

    def insert(self, record: NodeRecord) -> None:
        if record.data is None:
            record.data = Entry(*self.place(record, None))
        self._offer(record)

    def load(self, records: Iterable[NodeRecord]) -> None:
        for record in records:
            record.data = record.queued = None
            record.data = Entry(self.place(record, None)[0], record.last_use)
            self._offer(record)

    def use(self, record: NodeRecord) -> None:
        entry: Entry = record.data
        entry.last_use = self.just_now(record)
        self._offer(record)

    def unlock(self, record: NodeRecord) -> None:
        self._offer(record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        entry: Entry = tail.data
        prefix.data = Entry(entry.stratum, entry.last_use)
        self._offer(prefix)

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:  # which was used as lately
        self._unqueue(prefix.data)
        prefix.data = None

    def trim(self, record: NodeRecord, tokens: int) -> None:  # the event's
        self._named = None

    def remove(self, record: NodeRecord) -> None:
        self._named = None
        self._unqueue(record.data)
        record.data = None
        parent = record.parent
        if parent is not None and parent.is_evictable and not parent.data.stamp:
            self._queue(parent, parent.data)

    def defer(self, victim: Victim) -> None:
        self._named = None
        if victim.record.data is not None:
            self._offer(victim.record)

    # -- queues ------------------------------------------------------------------------------

    def _offer(self, record: NodeRecord) -> None:
        """Give a record its place anew, if it may be evicted."""
        if record.is_evictable:
            self._queue(record, record.data)
        else:
            self._unqueue(record.data)

    def _unqueue(self, entry: Entry) -> None:
        if entry.stamp:
            entry.stamp = 0
            self._valid -= 1

    def _queue(self, record: NodeRecord, entry: Entry) -> None:
        self._valid += not entry.stamp
        self._stamp = entry.stamp = stamp = self._stamp + 1
        queue = self._queues.get(entry.stratum)
        if queue is None:
            queue = self._queues[entry.stratum] = []
        if not queue or entry.last_use < queue[0][0]:
            heappush(self._ranked, (self._worth_of(entry), entry.stratum))
        heappush(queue, (entry.last_use, stamp, record))
        self._entries += 1
        if self._entries > 2 * self._valid + _SPARE:
            self._sweep()

    def _worth_of(self, entry: Entry) -> float:
        return self.worth(entry.stratum, max(0.0, self.reading()[1] - entry.last_use))

    # -- victims -----------------------------------------------------------------------------

    def next_victim(self, pool: str) -> Victim | None:  # it ranks one
        if self._named is not None:
            self._unqueue(self._named)  # it was not taken
            self._named = None
        if self._ranked_at != self.reading()[0]:
            self._ranked_at = self.reading()[0]
            self._rank()
        ranked = self._ranked
        while ranked:
            worth, stratum = ranked[0]
            record = self._first(stratum)
            if record is None:
                heappop(ranked)
                continue
            entry: Entry = record.data
            now = self._worth_of(entry)
            if now > worth:
                heapreplace(ranked, (now, stratum))
                continue
            self._named = entry
            return Victim(record, Action.DELETE)
        return None

    def _first(self, stratum: int) -> NodeRecord | None:
        """The least recently used record of a stratum; discards stale and unevictable entries before it."""
        queue = self._queues.get(stratum)
        while queue:
            _, stamp, record = queue[0]
            entry: Entry | None = record.data
            if entry is not None and entry.stamp == stamp:
                if record.is_evictable:
                    return record
                self._unqueue(entry)  # queued again as an unlocked leaf
            heappop(queue)
            self._entries -= 1
        return None

    def _rank(self) -> None:
        """Rank the strata that have records."""
        ranked: list[tuple[float, int]] = []
        for stratum in list(self._queues):
            record = self._first(stratum)
            if record is None:
                del self._queues[stratum]
            else:
                ranked.append((self._worth_of(record.data), stratum))
        heapify(ranked)
        self._ranked = ranked

    def _sweep(self) -> None:
        """Drop stale entries: most are."""
        self._entries = 0
        for queue in self._queues.values():
            queue[:] = [each for each in queue if each[2].data and each[2].data.stamp == each[1]]
            heapify(queue)
            self._entries += len(queue)

    # -- what it knows -----------------------------------------------------------------------

    def reuse_chance(self, record: NodeRecord, within: float = math.inf) -> float:
        entry: Entry | None = record.data
        chance = None if entry is None else self.chance(entry.stratum, entry.last_use, within)
        return VictimOrder.reuse_chance(self, record, within) if chance is None else chance


class BelowHazard(Below):
    """Ranks KV by the classes and the survival that the device's order has learned, and by the objective.

    A stratum is a class, and a range of depth if the objective tells them apart: what is evicted here has to
    be computed again, whereas on the device every token costs the same, a reload.

    Attributes:
        upper: The order of the device.
    """

    def __init__(self, upper: Hazard) -> None:
        super().__init__()
        self.upper = upper

    def place(self, record: NodeRecord, history: NodeRecord | None) -> tuple[int, float]:
        upper = self.upper
        intake, learner, depths = upper.intake, upper.learner, upper.depths
        intake.catch_up()
        known = None if history is None else history.data
        if isinstance(known, Entry):
            group, last_use = known.stratum // depths.count, known.last_use
        elif isinstance(known, Tracked):
            piece = known.pieces[-1]
            for trimmed in known.trimmed:
                if trimmed.start <= record.depth:
                    piece = trimmed
            group, last_use = learner.group_of(piece), piece.last_use
        else:
            group, last_use = self._group_above(record), self.just_now(record)
        if depths.count == 1:
            return group, last_use
        return group * depths.count + depths.of(record.depth + record.tokens // 2), last_use

    def _group_above(self, record: NodeRecord) -> int:
        """Class of what the device never had: that of the nearest node before it.

        As a class of its own, that of requests which have not ended, it would be evicted first.
        """
        above = record.parent
        while above is not None:
            if isinstance(above.data, Entry):
                return above.data.stratum // self.upper.depths.count
            above = above.parent
        return self.upper.learner.classes.open

    def reading(self) -> tuple[int, float]:
        intake = self.upper.intake
        return intake.requests, intake.now

    def just_now(self, record: NodeRecord) -> float:
        intake = self.upper.intake  # whose pace is a clock of its own, once it has one
        return intake.now if intake.pace is not None else max(intake.now, record.last_use)

    def worth(self, stratum: int, age: float) -> float:
        worth, depths = self.upper.ranker.worth, self.upper.depths
        if depths.count == 1:
            return worth.at(stratum, age)
        group, depth = divmod(stratum, depths.count)
        return worth.at(group, age) * (1.0 if worth.as_lru else depths.factors[depth])

    def chance(self, stratum: int, last_use: float, within: float) -> float | None:
        return self.upper.class_chance(stratum // self.upper.depths.count, last_use, within)


class BelowHazardStates(Below):
    """Ranks states, and the KV that they are at the end of, by what the device's order has learned of them.

    A stratum is a class of states and a power of two of the tokens that a state saves.

    Attributes:
        upper: The order of the device.
    """

    def __init__(self, upper: HazardStates) -> None:
        super().__init__()
        self.upper = upper

    def place(self, record: NodeRecord, history: NodeRecord | None) -> tuple[int, float]:
        if history is not None and isinstance(history.data, Entry):
            return history.data.stratum, history.data.last_use
        life = None if history is None else self.upper.learner.lives.get(history.serial)
        if life is None:
            return _UNKNOWN, record.last_use
        return life.group << _LENGTHS | min(record.end.bit_length(), (1 << _LENGTHS) - 1), life.last_use

    def reading(self) -> tuple[int, float]:
        return self.upper.requests, self.upper.learner.now

    def worth(self, stratum: int, age: float) -> float:
        if stratum == _UNKNOWN:
            return -1.0 / (1.0 + age)
        group, length = stratum >> _LENGTHS, stratum & (1 << _LENGTHS) - 1
        promise = self.upper.learner.worth_at(group, age)
        return float(promise * self.upper.weight(1 << length))

    def chance(self, stratum: int, last_use: float, within: float) -> float | None:
        if stratum == _UNKNOWN:
            return None
        return self.upper.class_chance(stratum >> _LENGTHS, last_use, within)
