"""Orders for a slower tier that rank by what hazard has learned on the device: one forecast for both tiers.

What the device evicts and remembers is what the slower tier holds. So a node takes its class and its last use
along, and what is learned of its class on the device, from all requests, ranks it below as well. An order
that learned from the slower tier alone would see only the few uses that the device missed.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

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

    Cost: O(log n) an event and a victim, and one look at each stratum that has records when a request has
    passed.
    """

    def __init__(self) -> None:
        self._queues: dict[int, list[tuple[float, int, NodeRecord]]] = {}
        self._ranked: list[tuple[float, int]] = []
        self._ranked_at = -1
        self._stamp = 0
        self._named: Entry | None = None

    # -- for subclasses ----------------------------------------------------------------------

    def place(self, record: NodeRecord, history: NodeRecord | None) -> tuple[int, float]:
        """Stratum of a new record, and the time of its last use."""
        raise NotImplementedError

    def time(self) -> tuple[int, float]:
        """Requests so far, and the time."""
        raise NotImplementedError

    def worth(self, stratum: int, age: float) -> float:
        """Worth of a stratum at an age; the lowest is evicted first."""
        raise NotImplementedError

    # -- events ------------------------------------------------------------------------------

    def inherit(self, record: NodeRecord, history: NodeRecord) -> None:
        record.data = Entry(*self.place(record, history))

    def insert(self, record: NodeRecord) -> None:
        if record.data is None:
            record.data = Entry(*self.place(record, None))
        self._queue(record)

    def use(self, record: NodeRecord) -> None:
        entry: Entry = record.data
        entry.last_use = self.time()[1]
        self._queue(record)

    def unlock(self, record: NodeRecord) -> None:
        self._queue(record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        entry: Entry = tail.data
        prefix.data = Entry(entry.stratum, entry.last_use)
        self._queue(prefix)

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:  # which was used as lately
        entry: Entry = prefix.data
        entry.stamp = 0
        prefix.data = None

    def trim(self, record: NodeRecord, tokens: int) -> None:  # the event's
        self._named = None

    def remove(self, record: NodeRecord) -> None:
        self._named = None
        entry: Entry = record.data
        entry.stamp = 0
        record.data = None

    def defer(self, victim: Victim) -> None:
        self._named = None
        if victim.record.data is not None:
            self._queue(victim.record)

    def _queue(self, record: NodeRecord) -> None:
        entry: Entry = record.data
        self._stamp = entry.stamp = stamp = self._stamp + 1
        queue = self._queues.get(entry.stratum)
        if queue is None:
            queue = self._queues[entry.stratum] = []
        if not queue:
            heappush(self._ranked, (self._worth_of(entry), entry.stratum))
        heappush(queue, (entry.last_use, stamp, record))

    def _worth_of(self, entry: Entry) -> float:
        return self.worth(entry.stratum, max(0.0, self.time()[1] - entry.last_use))

    # -- victims -----------------------------------------------------------------------------

    def next_victim(self, pool: str) -> Victim | None:  # it ranks one
        if self._named is not None:
            self._named.stamp = 0  # it was not taken
            self._named = None
        if self._ranked_at != self.time()[0]:
            self._ranked_at = self.time()[0]
            self._rank()
        ranked = self._ranked
        while ranked:
            worth, stratum = ranked[0]
            queue = self._queues[stratum]
            while queue and self._is_stale(queue[0]):
                heappop(queue)
            if not queue:
                heappop(ranked)
                continue
            record = queue[0][2]
            entry: Entry = record.data
            now = self._worth_of(entry)
            if now > worth:
                heapreplace(ranked, (now, stratum))
                continue
            self._named = entry
            return Victim(record, Action.DELETE)
        return None

    def _is_stale(self, queued: tuple[float, int, NodeRecord]) -> bool:
        _, stamp, record = queued
        entry: Entry | None = record.data
        return entry is None or entry.stamp != stamp or not record.is_evictable

    def _rank(self) -> None:
        ranked: list[tuple[float, int]] = []
        for stratum, queue in list(self._queues.items()):
            if len(queue) > 64 and sum(map(self._is_stale, queue)) * 2 > len(queue):
                queue[:] = [queued for queued in queue if not self._is_stale(queued)]
                heapify(queue)
            while queue and self._is_stale(queue[0]):
                heappop(queue)
            if queue:
                ranked.append((self._worth_of(queue[0][2].data), stratum))
            else:
                del self._queues[stratum]
        heapify(ranked)
        self._ranked = ranked


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
        learner = self.upper.learner
        known = None if history is None else history.data
        if isinstance(known, Entry):
            return known.stratum, known.last_use
        group, last_use = learner.classes.open, record.last_use
        if isinstance(known, Tracked):
            piece = known.pieces[-1]
            for trimmed in known.trimmed:
                if trimmed.start <= record.depth:
                    piece = trimmed
            group, last_use = learner.group_of(piece), piece.last_use
        depths = self.upper.depths
        if depths.count == 1:
            return group, last_use
        return group * depths.count + depths.of(record.depth + record.tokens // 2), last_use

    def time(self) -> tuple[int, float]:
        intake = self.upper.intake
        return intake.requests, intake.now

    def worth(self, stratum: int, age: float) -> float:
        worth, depths = self.upper.ranker.worth, self.upper.depths
        if depths.count == 1:
            return worth.at(stratum, age)
        group, depth = divmod(stratum, depths.count)
        return worth.at(group, age) * (1.0 if worth.as_lru else depths.factors[depth])


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

    def time(self) -> tuple[int, float]:
        return self.upper.requests, self.upper.learner.now

    def worth(self, stratum: int, age: float) -> float:
        if stratum == _UNKNOWN:
            return -1.0 / (1.0 + age)
        group, length = stratum >> _LENGTHS, stratum & (1 << _LENGTHS) - 1
        promise = self.upper.learner.worth_at(group, age)
        return float(promise * self.upper.weight(1 << length))
