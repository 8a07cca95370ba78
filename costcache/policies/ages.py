"""Queues of leaves by class and age, in which the least valuable is found without looking at all.

What a leaf is worth depends on its class and its age alone. So leaves of one class that were used at about
the same time stay together for life: they are a *run*. As runs grow old, neighbours whose ages have become
nearly equal merge, so that a class has a few dozen at most. Runs that have leaves are ranked anew now and
then; in between, the worst one is on top of a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from costcache.records import NodeRecord

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
    """All runs, by class from old to new.

    Attributes:
        runs: By class, the runs from old to new.
        now: The time for which runs are ranked.
    """

    def __init__(self, worth: Callable[[int, float], float]) -> None:
        """Start without classes.

        Args:
            worth: What a class brings at an age; the lowest goes first.
        """
        self.runs: list[list[Run[W]]] = []
        self.now = 0.0
        self._worth = worth
        self._current: list[Run[W] | None] = []  # takes what is used now, None before the first of a period
        self._entries = 0
        self._ranked: list[tuple[float, float, int, Run[W]]] = []
        self._stamp = 0
        self._listings = 0

    def __len__(self) -> int:
        """Entries, left over ones included."""
        return self._entries

    def run(self, group: int, now: float) -> Run[W]:
        """The run of a class that takes what is used now."""
        while group >= len(self.runs):
            self.runs.append([])
            self._current.append(None)
        run = self._current[group]
        if run is None:
            run = self._current[group] = Run(group, now)
            self.runs[group].append(run)
        elif now > run.last:
            run.last = now
        return run

    # -- leaves ------------------------------------------------------------------------------

    def push(self, run: Run[W], place: W) -> None:
        """Let a leaf stand in a run, and nowhere else."""
        self._stamp = place.stamp = stamp = self._stamp + 1
        heapq.heappush(run.heap, (place.record.recency, stamp, place))
        self._entries += 1
        if not run.listed:
            self._list(run)

    def _list(self, run: Run[W]) -> None:
        run.listed = True
        self._listings = number = self._listings + 1
        worth = self._worth(run.group, self.now - (run.first + run.last) / 2)
        heapq.heappush(self._ranked, (worth, run.first, number, run))

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
                        heapq.heapreplace(heap, (record.recency, stamp, place))
                        continue
                    else:
                        return place
                heapq.heappop(heap)
                self._entries -= 1
            heapq.heappop(ranked)
            run.listed = False
        return None

    # -- now and then ------------------------------------------------------------------------

    def rank(self, now: float) -> None:
        """End a period: close the runs that take what is used, and rank those that have leaves anew."""
        self.now = now
        self._current = [None] * len(self.runs)
        ranked: list[tuple[float, float, int, Run[W]]] = []
        worth = self._worth
        for _, first, number, run in self._ranked:
            if run.heap:
                ranked.append((worth(run.group, now - (run.first + run.last) / 2), first, number, run))
            else:
                run.listed = False
        heapq.heapify(ranked)
        self._ranked = ranked

    def merge(self, now: float) -> None:
        """Merge neighbours of about the same age, and drop what is empty; :meth:`rank` has to follow."""
        self.now = now
        self._current = [None] * len(self.runs)
        for group, runs in enumerate(self.runs):
            if not runs:
                continue
            kept: list[Run[W]] = []
            for run in runs:
                if not run.risk and not run.heap:
                    continue
                if kept and run.last - kept[-1].first <= _NEAR * (now - run.last):
                    self._join(kept[-1], run)
                else:
                    kept.append(run)
            self.runs[group] = kept

    def _join(self, older: Run[W], newer: Run[W]) -> None:
        older.last = newer.last
        older.risk += newer.risk
        newer.into = older
        if newer.heap:
            if older.heap:
                older.heap += newer.heap
                heapq.heapify(older.heap)
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
        for runs in self.runs:
            for run in runs:
                run.heap = [entry for entry in run.heap if entry[2].stamp == entry[1]]
                heapq.heapify(run.heap)
                self._entries += len(run.heap)
