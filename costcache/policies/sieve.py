"""SIEVE: a hand goes over the nodes from old to new and takes the first without a hit."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.policies.queues import Place, Queue, QueueOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["Sieve"]


class Sieve(QueueOrder):
    """The hand goes from old to new, round and round; the first leaf that was not hit since goes.

    What it finds hit stays where it is, and counts as not hit from then on.

    Source: Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson and K. V. Rashmi, "SIEVE is simpler than LRU: an
    efficient turn-key eviction algorithm for web caches", NSDI 2024. No parameters.

    Departures: objects are nodes of tokens; only unlocked leaves may go, and a node whose turn comes while
    it may not go is next under the hand once it may; a hit is counted once per request; a victim
    of which only the tail went is still under the hand. A victim costs O(1), amortised.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = Queue()
        self._hand: Place | None = None  # None for the old end

    def insert(self, record: NodeRecord) -> None:
        self.enter(Place(record, self._queue))

    def leave_line(self, place: Place) -> None:
        if place is self._hand:
            self._hand = self._queue.newer(place)
        super().leave_line(place)

    def come_back(self, place: Place) -> None:
        self._queue.add_before(place, self._hand or self._queue.oldest)
        self._hand = place

    def next_victim(self, pool: str) -> Victim | None:
        queue = self._queue
        while (place := self._hand or queue.oldest) is not None:
            if place.record.uses != place.uses:
                place.uses = place.record.uses
                self._hand = queue.newer(place)
            elif self.can_go(place):
                self._hand = place
                return self.name(place)
            else:
                self._hand = place
                self.leave_line(place)
        self._named = None
        return None


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "sieve": PolicySpec(
            lambda cost, pools, settings: Sieve(),
            "Oldest without a hit since the hand last passed first.",
        )
    }
