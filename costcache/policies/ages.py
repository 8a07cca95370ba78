"""Queues of leaves by class and age, in which the least valuable is found without looking at all.

What a leaf is worth depends on its class and its age alone. So leaves of one class that were used at about
the same time stay together for life: they are a *run*. As runs grow old, neighbours whose ages have become
nearly equal merge, so that a class has a few dozen at most. Runs that have leaves are ranked anew now and
then; in between, the worst one is on top of a heap.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Generic, TypeVar

from costcache.records import NodeRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.policies.worth import Worth

__all__ = ["AgeQueues", "Run", "Waiting"]

_NEAR = 0.25
"""Runs merge when the time that both span is less than this share of their age."""
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
        first: The earliest of the uses.
        last: The latest.
        risk: Tokens that have not been used again since, evicted ones that are remembered included.
        heap: Leaves that may go: ``(recency, stamp, place)``, the least recent on top.
        listed: It is in the heap of runs.
        into: The run that it has become part of.
    """

    __slots__ = ("first", "group", "heap", "into", "last", "listed", "risk")

    def __init__(self, group: int, now: float) -> None:
        self.group = group
        self.first = now
        self.last = now
        self.risk = 0
        self.heap: list[tuple[int, int, W]] = []
        self.listed = False
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
    """All runs.

    Attributes:
        runs: Those that were there at the last merge, by class and from old to new, and the newer ones.
        current: By class, the run that takes what is used now, if it has begun.
        now: The time for which runs are ranked.
    """

    def __init__(self, worth: Worth) -> None:
        """Start without runs.

        Args:
            worth: What a class brings at an age; the lowest goes first.
        """
        import numpy as np

        self.runs: list[Run[W]] = []
        self.now = 0.0
        self._worth = worth
        self.current: dict[int, Run[W]] = {}
        self._entries = 0
        self._ranked: list[tuple[float, float, int, Run[W]]] = []
        self._stamp = 0
        self._listings = 0
        # Of the runs that were there at the last merge: class, and first and last use.
        self._known = np.empty(0, np.int64), np.empty(0), np.empty(0)

    def __len__(self) -> int:
        """Entries, left over ones included."""
        return self._entries

    def begin(self, group: int, now: float) -> Run[W]:
        """Begin a run of a class that has no current one."""
        run = self.current[group] = Run(group, now)
        self.runs.append(run)
        return run

    # -- leaves ------------------------------------------------------------------------------

    def push(self, run: Run[W], place: W) -> None:
        """Let a leaf stand in a run, and nowhere else."""
        self._stamp = place.stamp = stamp = self._stamp + 1
        heappush(run.heap, (place.record.recency, stamp, place))
        self._entries += 1
        if not run.listed:
            self._list(run)

    def _list(self, run: Run[W]) -> None:
        run.listed = True
        self._listings = number = self._listings + 1
        worth = self._worth.at(run.group, self.now - (run.first + run.last) / 2)
        heappush(self._ranked, (worth, run.first, number, run))

    def pop(self) -> W | None:
        """The place of the least valuable leaf that may go, which stays where it is; None without any.

        Entries on the way that are left over, or of what may not go now, are dropped.
        """
        ranked = self._ranked
        while ranked:
            run = ranked[0][3]
            heap = run.heap
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
            run.listed = False
        return None

    # -- now and then ------------------------------------------------------------------------

    def rank(self, now: float) -> None:
        """End a period: close the runs that take what is used, and rank those that have leaves anew."""
        import numpy as np

        self.now = now
        self.current = {}
        ranked = self._ranked
        heaps = [entry[3].heap for entry in ranked]
        if not all(heaps):
            for _, _, _, run in compress(ranked, map(not_, heaps)):
                run.listed = False
            self._ranked = ranked = list(compress(ranked, heaps))
        if ranked:
            _, firsts, numbers, runs = zip(*ranked, strict=True)
            middles = (np.array(firsts) + np.array([run.last for run in runs])) / 2
            worths = self._worth.of([run.group for run in runs], now - middles)
            self._ranked = ranked = list(zip(worths.tolist(), firsts, numbers, runs, strict=True))
            heapify(ranked)

    def merge(self, now: float) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Merge neighbours of about the same age, and drop what is empty; :meth:`rank` has to follow.

        Returns:
            Class, age and tokens at risk of each run that is left, of shape [runs].
        """
        import numpy as np

        self.now = now
        self.current = {}
        runs, (groups, firsts, lasts) = self.runs, self._known
        new = runs[len(groups) :]
        groups = np.concatenate((groups, np.array([run.group for run in new], np.int64)))
        firsts = np.concatenate((firsts, [run.first for run in new]))
        lasts = np.concatenate((lasts, [run.last for run in new]))
        order = np.argsort(groups, kind="stable")
        groups, firsts, lasts = groups[order], firsts[order], lasts[order]
        runs = list(map(runs.__getitem__, order.tolist()))
        risks = np.array([run.risk for run in runs], np.float64)
        kept = risks != 0
        for at in np.flatnonzero(~kept).tolist():
            kept[at] = bool(runs[at].heap)
        near = lasts[1:] - firsts[:-1] <= _NEAR * (now - lasts[1:])
        near &= groups[1:] == groups[:-1]
        near &= kept[1:]
        for at in (np.flatnonzero(near) + 1).tolist():
            newer, before = runs[at], at - 1
            while before >= 0 and not kept[before]:
                before -= 1
            older = runs[before]
            if (
                before >= 0
                and older.group == newer.group
                and newer.last - older.first <= _NEAR * (now - newer.last)
            ):
                self._join(older, newer)
                kept[at] = False
                lasts[before] = newer.last
                risks[before] += risks[at]
        self.runs = list(compress(runs, kept.tolist()))
        self._known = groups, firsts, lasts = groups[kept], firsts[kept], lasts[kept]
        return groups, now - (firsts + lasts) / 2, risks[kept]

    def _join(self, older: Run[W], newer: Run[W]) -> None:
        older.last = newer.last
        older.risk += newer.risk
        newer.into = older
        if newer.heap:
            if older.heap:
                older.heap += newer.heap
                heapify(older.heap)
            else:
                older.heap = newer.heap
            newer.heap = []
            if not older.listed:
                self._list(older)

    def sweep(self, leaves: int) -> None:
        """Drop entries that are left over, if there are more of them than leaves.

        Args:
            leaves: Entries that may count, at most.
        """
        if self._entries <= 2 * leaves + _SPARE:
            return
        self._entries = 0
        for run in self.runs:
            run.heap = [entry for entry in run.heap if entry[2].stamp == entry[1]]
            heapify(run.heap)
            self._entries += len(run.heap)
