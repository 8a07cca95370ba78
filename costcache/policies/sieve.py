"""SIEVE: a hand moves over the nodes from old to new and evicts the first without a hit."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.policies.queues import Entry, Queue, QueueOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["Sieve"]


class Sieve(QueueOrder):
    """Moves a hand from old to new, round and round; evicts the first leaf without a hit since its last pass.

    A node that was hit keeps its position, and its hit is cleared.

    Source: Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson and K. V. Rashmi, "SIEVE is simpler than LRU: an
    efficient turn-key eviction algorithm for web caches", NSDI 2024. No parameters.

    Departures: objects are nodes of tokens; only unlocked leaves are evicted, and a node whose turn comes
    while it is not evictable is next under the hand once it is; a hit is counted once per request; a victim
    that is only trimmed stays under the hand. A victim costs O(1), amortised.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = Queue()
        self._hand: Entry | None = None  # None for the old end

    def insert(self, record: NodeRecord) -> None:
        self.enter(Entry(record, self._queue))

    def leave_line(self, entry: Entry) -> None:
        if entry is self._hand:
            self._hand = self._queue.newer(entry)
        super().leave_line(entry)

    def rejoin(self, entry: Entry) -> None:
        self._queue.add_before(entry, self._hand or self._queue.oldest)
        self._hand = entry

    def next_victim(self, pool: str) -> Victim | None:
        queue = self._queue
        while (entry := self._hand or queue.oldest) is not None:
            if entry.record.uses != entry.uses:
                entry.uses = entry.record.uses
                self._hand = queue.newer(entry)
            elif self.can_name(entry):
                self._hand = entry
                return self.name(entry)
            else:
                self._hand = entry
                self.leave_line(entry)
        self._named = None
        return None


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "sieve": PolicySpec(
            lambda cost, pools, settings: Sieve(),
            "Oldest node without a hit since the hand last passed it.",
        )
    }
