"""Queues of leaves by class and age, in which the least valuable is found without looking at all.

What a leaf is worth depends on its class and its age alone. So leaves of one class that were used at about
the same time stay together for life: they are a *run*. As runs grow old, neighbours whose ages have become
nearly equal merge, so that a class has a few dozen at most. Runs that have leaves are ranked anew now and
then; in between, the worst one is on top of a heap.
"""

from __future__ import annotations

import math
from array import array
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Generic, TypeVar

from costcache.records import NodeRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.policies.worth import Worth

__all__ = ["AgeQueues", "Run", "Waiting"]

_NEAR = 0.25
"""Runs merge when the time that both span is less than this share of their age."""
_AT_FIRST = 16
"""Runs that are ranked at once."""
_FEW = 48
"""Runs that are ranked faster one by one than with arrays; more than are ranked at once."""
_REST = -1
"""The row of an entry that stands for all others."""
_SPARE = 1024
"""Entries that may be left over, besides as many as there are leaves."""


class Waiting:
    """What stands in a queue: a record, and which of its entries counts.

    Attributes:
        record: The record.
        stamp: Stamp of its entry; 0 while it has none. Entries with another stamp are left over.
    """

    __slots__ = ("record", "stamp")

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.stamp = 0


W = TypeVar("W", bound=Waiting)


class Run(Generic[W]):
    """Nodes of one class whose last use was in one span of time.

    Attributes:
        group: Their class.
        slot: Its row in the columns of :class:`AgeQueues`, as long as it has not become part of another.
        heap: Leaves that may go: ``(recency, stamp, place)``, the least recent on top.
        into: The run that it has become part of.
    """

    __slots__ = ("group", "heap", "into", "slot")

    def __init__(self, group: int, slot: int) -> None:
        self.group = group
        self.slot = slot
        self.heap: list[tuple[int, int, W]] = []
        self.into: Run[W] | None = None

    def whole(self) -> Run[W]:
        """The run that it is part of by now: itself, as long as it has not merged."""
        run = self
        while run.into is not None:
            run = run.into
        if run is not self:
            self.into = run  # the next one finds it at once
        return run


class AgeQueues(Generic[W]):
    """All runs. What is looked at for all of them at once is in columns, one row a run.

    Attributes:
        current: The run that takes what begins now, if there is one: by class, and for what was not used
            just now by its bin of age too.
        now: The time for which runs are ranked.
        first: Column: the earliest of a run's uses.
        last: Column: the latest.
        risk: Column: tokens that have not been used again since, evicted ones that are remembered included.
    """

    def __init__(self, worth: Worth) -> None:
        """Start without runs.

        Args:
            worth: What a class brings at an age; the lowest goes first.
        """
        import numpy as np

        self.current: dict[int | tuple[int, int], Run[W]] = {}
        self.now = 0.0
        self.first = array("d")
        self.last = array("d")
        self.risk = array("d")
        self._group = array("q")
        self._listing = array("q")  # number of the entry among the ranked ones; 0 without
        self._runs: list[Run[W] | None] = []  # by row
        self._unused: list[int] = []  # rows
        self._order = np.zeros(0, np.int64)  # rows, by class and from old to new, as of the last merge
        self._begun: list[int] = []  # rows since then
        self._worth = worth
        self._entries = 0
        self._ranked: list[tuple[float, float, int, int]] = []
        # Worths and rows of all, and the least worth of those that are not among the ranked yet.
        self._rest: tuple[NDArray[np.float64], NDArray[np.int64], float] | None = None
        self._stamp = 0
        self._listings = 0

    def __len__(self) -> int:
        """Entries, left over ones included."""
        return self._entries

    def runs(self) -> list[Run[W]]:
        """All runs."""
        return [run for run in self._runs if run is not None]

    def begin(self, group: int, since: float) -> Run[W]:
        """Begin a run of a class, with something that was used last at ``since``."""
        if self._unused:
            slot = self._unused.pop()
        else:
            slot = len(self._runs)
            self._runs.append(None)
            self._group.append(0)
            self._listing.append(0)
            for column in (self.first, self.last, self.risk):
                column.append(0.0)
        self._group[slot] = group
        self.first[slot] = self.last[slot] = since
        self._begun.append(slot)
        run = self._runs[slot] = Run(group, slot)
        return run

    # -- leaves ------------------------------------------------------------------------------

    def push(self, run: Run[W], place: W) -> None:
        """Let a leaf stand in a run, and nowhere else."""
        self._stamp = place.stamp = stamp = self._stamp + 1
        heappush(run.heap, (place.record.recency, stamp, place))
        self._entries += 1
        slot = run.slot
        if not self._listing[slot]:
            self._listing[slot] = self._listings = number = self._listings + 1
            first = self.first[slot]
            worth = self._worth.at(run.group, self.now - (first + self.last[slot]) / 2)
            heappush(self._ranked, (worth, first, number, slot))

    def pop(self) -> W | None:
        """The place of the least valuable leaf that may go, which stays where it is; None without any.

        Entries on the way that are left over, or of what may not go now, are dropped.
        """
        ranked = self._ranked
        while ranked:
            slot = ranked[0][3]
            if slot == _REST:
                heappop(ranked)
                self._rank_rest()
                continue
            run = self._runs[slot]
            heap = run.heap if run is not None else None
            while heap:
                recency, stamp, place = heap[0]
                if place.stamp == stamp:
                    record = place.record
                    if record.live_children or record.locks:
                        place.stamp = 0
                    elif record.recency != recency:
                        heapreplace(heap, (record.recency, stamp, place))
                        continue
                    else:
                        return place
                heappop(heap)
                self._entries -= 1
            heappop(ranked)
            self._listing[slot] = 0
        return None

    # -- now and then ------------------------------------------------------------------------

    def rank(self, now: float) -> None:
        """End a period: close the runs that take what is used, and rank those that have leaves anew."""
        import numpy as np

        self.now = now
        self.current.clear()
        self._ranked = []
        self._rest = None
        slots = np.asarray(self._listing).nonzero()[0]
        if len(slots) <= _FEW:
            rows, worth = slots.tolist(), self._worth.at
            group, firsts, last = self._group, self.first, self.last
            self._rank([worth(group[row], now - (firsts[row] + last[row]) / 2) for row in rows], rows)
            return
        ages = now - (np.asarray(self.first).take(slots) + np.asarray(self.last).take(slots)) / 2
        worths = self._worth.of(np.asarray(self._group).take(slots), ages)
        # Only the worst are likely to be wanted before the next time. What is worth less than the others
        # comes before their entry, in which -inf stands before any time.
        least = np.partition(worths, _AT_FIRST)[_AT_FIRST]
        self._ranked.append((float(least), -math.inf, 0, _REST))
        self._rest = worths, slots, least
        first = (worths < least).nonzero()[0]
        self._rank(worths.take(first).tolist(), slots.take(first).tolist())

    def _rank_rest(self) -> None:
        if self._rest is not None:
            worths, slots, least = self._rest
            rest = worths >= least
            self._rank(worths[rest].tolist(), slots[rest].tolist())

    def _rank(self, worths: list[float], rows: list[int]) -> None:
        first, listing = map(self.first.__getitem__, rows), map(self._listing.__getitem__, rows)
        self._ranked += zip(worths, first, listing, rows, strict=True)
        heapify(self._ranked)

    def merge(self, now: float) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Merge neighbours of about the same age, and drop what is empty; :meth:`rank` has to follow.

        Returns:
            Class, age and tokens at risk of each run that is left, of shape [runs].
        """
        import numpy as np

        self.now = now
        self.current.clear()
        slots = np.concatenate((self._order, np.array(self._begun, np.int64)))
        group, first, last = np.asarray(self._group), np.asarray(self.first), np.asarray(self.last)
        slots = slots[np.lexsort((first[slots], group[slots]))]
        group, first = group[slots], first[slots]
        latest = np.maximum(last[slots[1:]], last[slots[:-1]])
        near = (latest - first[:-1] <= _NEAR * (now - latest)) & (group[1:] == group[:-1])
        risk = np.asarray(self.risk)
        kept = risk[slots] != 0
        runs, order, keeps = self._runs, slots.tolist(), kept.data  # read and written one by one below
        for at in (~kept).nonzero()[0].tolist():
            run = runs[order[at]]
            keeps[at] = run is not None and bool(run.heap)
        for at in (near.nonzero()[0] + 1).tolist():
            if keeps[at]:
                before = at - 1
                while before >= 0 and not keeps[before]:
                    before -= 1
                keeps[at] = before < 0 or not self._join(order[before], order[at])
        gone = slots[~kept]
        self._unused += (left_over := gone.tolist())
        for slot in left_over:
            runs[slot] = None
        np.asarray(self._listing)[gone] = 0
        risk[gone] = 0.0
        self._begun = []
        self._order = slots = slots[kept]
        return group[kept], now - (first[kept] + last[slots]) / 2, risk[slots]

    def _join(self, before: int, at: int) -> bool:
        """Make a run part of an older one, if that is near and of the same class."""
        older, newer, last = self._runs[before], self._runs[at], max(self.last[before], self.last[at])
        if older is None or newer is None or older.group != newer.group:
            return False
        if last - self.first[before] > _NEAR * (self.now - last):
            return False
        self.last[before] = last
        self.risk[before] += self.risk[at]
        newer.into = older
        if newer.heap:
            if older.heap:
                older.heap += newer.heap
                heapify(older.heap)
            else:
                older.heap = newer.heap
            newer.heap = []
            if not self._listing[before]:
                self._listing[before] = self._listings = self._listings + 1
        return True

    def sweep(self, leaves: int) -> None:
        """Drop entries that are left over, if there are more of them than leaves; :meth:`rank` has to follow.

        Args:
            leaves: Entries that may count, at most.
        """
        if self._entries <= 2 * leaves + _SPARE:
            return
        self._entries = 0
        for run in self.runs():
            run.heap = [entry for entry in run.heap if entry[2].stamp == entry[1]]
            heapify(run.heap)
            self._entries += len(run.heap)
            if not run.heap:
                self._listing[run.slot] = 0
