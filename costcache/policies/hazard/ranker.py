"""Ranks leaves: the least valuable one is found without looking at all of them.

Leaves of a cohort are worth the same, and the least recently used one is evicted first. Cohorts that have
leaves are ranked anew now and then; in between, the least valuable one is on top of a heap.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

from costcache.policies.hazard.history import Cohort, Tracked
from costcache.policies.hazard.learner import Learner
from costcache.policies.hazard.worth import Worth

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Ranker"]

_AT_FIRST: Final = 16
"""Cohorts that are ranked at once."""
_FEW: Final = 48
"""Up to so many cohorts are ranked faster one by one than with arrays; beyond, all are ranked at once."""
_REST: Final = -1
"""Row of the entry that stands for all cohorts that are not ranked yet."""
_SPARE: Final = 1024
"""Stale entries that are tolerated, besides as many as there are leaves."""


class Ranker:
    """Leaves in order of worth.

    Attributes:
        worth: Worth of a stratum at an age; the lowest is evicted first.
        now: The time for which cohorts are ranked.
        dirty: Nodes that were made, used or freed since they were last ranked.
        pinned_by_waiters: Leaves that waiting requests need, not ranked while they do.
    """

    def __init__(self, learner: Learner, worth: Worth) -> None:
        """Start without leaves.

        Args:
            learner: Keeps the cohorts.
            worth: Worth of a stratum at an age.
        """
        self.worth = worth
        self.now = 0.0
        self.dirty: list[Tracked] = []
        self.pinned_by_waiters: dict[Tracked, None] = {}
        self._learner = learner
        self._cohorts = cohorts = learner.cohorts
        self._by_row, self._listed = cohorts.by_row, cohorts.listed
        self._first, self._last = cohorts.first, cohorts.last
        self._entries = 0
        self._stamp = 0
        # Worth, first use, number and row of cohorts that have leaves, as a heap.
        self._ranked: list[tuple[float, float, int, int]] = []
        # Worth and row of all of them, and the least worth of those that are not among the ranked yet.
        self._rest: tuple[NDArray[np.float64], NDArray[np.int64], float] | None = None

    def __len__(self) -> int:
        """Entries of leaves, stale ones included."""
        return self._entries

    # -- leaves ------------------------------------------------------------------------------

    def mark_dirty(self, tracked: Tracked) -> None:
        """Rank a node before the next victim."""
        if not tracked.dirty:
            tracked.dirty = True
            self.dirty.append(tracked)

    def flush_dirty(self, requests: int, now: float) -> None:
        """Rank the nodes that have been marked, those of them that may be evicted.

        Args:
            requests: Requests so far.
            now: The time.
        """
        learner, pinned = self._learner, self.pinned_by_waiters
        for tracked in self.dirty:
            tracked.dirty = False
            record = tracked.record
            if record.live_children or record.locks or record.data is not tracked:
                continue
            # A leaf is either promised to a waiter or has a place: with both it would be named twice.
            if tracked.pinned_until > requests:
                tracked.stamp = 0
                pinned[tracked] = None
                continue
            if pinned:
                pinned.pop(tracked, None)
            for piece in tracked.pieces:
                if piece.cohort is None:
                    learner.begin(piece, piece.group, now)
            cohort = tracked.pieces[-1].cohort
            if cohort is not None:
                self.push(cohort if cohort.into is None else cohort.whole(), tracked)
        self.dirty.clear()

    def unpin(self, requests: float) -> None:
        """Offer leaves again that were pinned for waiters up to so many requests."""
        for tracked in [t for t in self.pinned_by_waiters if t.pinned_until <= requests]:
            del self.pinned_by_waiters[tracked]
            tracked.pinned_until = 0
            self.mark_dirty(tracked)

    def push(self, cohort: Cohort, tracked: Tracked) -> None:
        """Put a leaf into a cohort; its entries elsewhere become stale."""
        self._stamp = tracked.stamp = stamp = self._stamp + 1
        heappush(cohort.heap, (tracked.record.recency, stamp, tracked))
        self._entries += 1
        slot = cohort.slot
        if not self._listed[slot]:
            number, first = self._cohorts.list_leaves(slot), self._first[slot]
            worth = self.worth.at(cohort.stratum, self.now - (first + self._last[slot]) / 2)
            heappush(self._ranked, (worth, first, number, slot))

    def pop(self) -> Tracked | None:
        """The least valuable leaf that may be evicted, which keeps its entry; None without any.

        Discards stale and unevictable entries on the way.
        """
        ranked = self._ranked
        while ranked:
            slot = ranked[0][3]
            if slot == _REST:
                heappop(ranked)
                self._rank_rest()
                continue
            cohort = self._by_row[slot]
            heap = cohort.heap if cohort is not None else None
            while heap:
                recency, stamp, tracked = heap[0]
                if tracked.stamp == stamp:
                    record = tracked.record
                    if record.live_children or record.locks:
                        tracked.stamp = 0
                    elif record.recency != recency:
                        heapreplace(heap, (record.recency, stamp, tracked))
                        continue
                    else:
                        return tracked
                heappop(heap)
                self._entries -= 1
            heappop(ranked)
            self._listed[slot] = 0
        return None

    # -- now and then ------------------------------------------------------------------------

    def rank(self, now: float) -> None:
        """Close the cohorts that intervals begin in, and rank those that have leaves, for a time."""
        import numpy as np

        self.now = now
        cohorts = self._cohorts
        cohorts.current.clear()
        self._ranked = []
        self._rest = None
        slots = np.asarray(self._listed).nonzero()[0]
        ages = now - (np.asarray(self._first).take(slots) + np.asarray(self._last).take(slots)) / 2
        strata = np.asarray(cohorts.stratum).take(slots)
        if len(slots) <= _FEW:
            self._rank(self.worth.each(strata.tolist(), ages.tolist()), slots)
            return
        worths = self.worth.of(strata, ages)
        # Only the least valuable are likely to be needed before the next ranking. What is worth less than
        # the others comes before their entry, in which -inf sorts before any time.
        least = np.partition(worths, _AT_FIRST)[_AT_FIRST]
        self._ranked.append((float(least), -math.inf, 0, _REST))
        self._rest = worths, slots, least
        first = (worths < least).nonzero()[0]
        self._rank(worths.take(first).tolist(), slots.take(first))

    def _rank_rest(self) -> None:
        if self._rest is not None:
            worths, slots, least = self._rest
            rest = worths >= least
            self._rank(worths[rest].tolist(), slots[rest])

    def _rank(self, worths: list[float], slots: NDArray[np.int64]) -> None:
        import numpy as np

        first = np.asarray(self._first).take(slots).tolist()
        listed = np.asarray(self._listed).take(slots).tolist()
        self._ranked += zip(worths, first, listed, slots.tolist(), strict=True)
        heapify(self._ranked)

    def sweep(self, leaves: int) -> None:
        """Drop stale entries, if there are more of them than leaves; a new ranking has to follow.

        Args:
            leaves: Entries that may be valid, at most.
        """
        if self._entries <= 2 * leaves + _SPARE:
            return
        self._entries = 0
        for cohort in self._cohorts.all():
            cohort.heap = [entry for entry in cohort.heap if entry[2].stamp == entry[1]]
            heapify(cohort.heap)
            self._entries += len(cohort.heap)
            if not cohort.heap:
                self._listed[cohort.slot] = 0
