"""Cohorts: open reuse intervals by class and time of the last use.

The worth of a leaf depends on its class, its depth and its age alone. So leaves of one class that were used
at about the same time stay together for life. As cohorts grow old, neighbours whose ages have become nearly
equal merge, so that a class has a few dozen at most.
"""

from __future__ import annotations

from array import array
from heapq import heapify
from typing import TYPE_CHECKING, Final

from costcache.policies.hazard.history import Cohort

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Cohorts"]

_NEAR: Final = 0.25
"""Cohorts merge when the time that both span is less than this share of their age."""


class Cohorts:
    """All cohorts. What is read of all of them at once is in columns, one row a cohort.

    Attributes:
        current: The cohort that takes intervals beginning now, if there is one: by stratum, and for tokens
            that were not used just now by their bin of age too.
        by_row: The cohorts; None in rows that are unused.
        stratum: Column: class and depth.
        first: Column: the earliest of its last uses.
        last: Column: the latest.
        at_risk: Column: tokens not used again since, evicted ones that are remembered included.
        listed: Column: number of its entry in the ranking, see :meth:`list_leaves`; 0 without leaves.
    """

    def __init__(self) -> None:
        import numpy as np

        self.current: dict[int | tuple[int, int], Cohort] = {}
        self.by_row: list[Cohort | None] = []
        self.stratum = array("q")
        self.first = array("d")
        self.last = array("d")
        self.at_risk = array("d")
        self.listed = array("q")
        self._unused: list[int] = []  # rows
        self._sorted = np.zeros(0, np.int64)  # rows, by stratum and from old to new, as of the last merge
        self._begun: list[int] = []  # rows since then
        self._listings = 0

    def all(self) -> list[Cohort]:
        """All cohorts."""
        return [cohort for cohort in self.by_row if cohort is not None]

    def begin(self, stratum: int, last_use: float) -> Cohort:
        """Begin a cohort with something that was last used at ``last_use``."""
        if self._unused:
            slot = self._unused.pop()
        else:
            slot = len(self.by_row)
            self.by_row.append(None)
            self.stratum.append(0)
            self.listed.append(0)
            for column in (self.first, self.last, self.at_risk):
                column.append(0.0)
        self.stratum[slot] = stratum
        self.first[slot] = self.last[slot] = last_use
        self._begun.append(slot)
        cohort = self.by_row[slot] = Cohort(stratum, slot)
        return cohort

    def list_leaves(self, slot: int) -> int:
        """Give a cohort that has leaves now a number, by which ties are broken; returns it."""
        self.listed[slot] = self._listings = number = self._listings + 1
        return number

    def merge(self, now: float) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Merge neighbours of about the same age, and drop empty cohorts; a new ranking has to follow.

        Returns:
            Stratum, age and tokens at risk of each cohort that is left, of shape [cohorts].
        """
        import numpy as np

        self.current.clear()
        slots = np.concatenate((self._sorted, np.array(self._begun, np.int64)))
        stratum, first, last = np.asarray(self.stratum), np.asarray(self.first), np.asarray(self.last)
        slots = slots[np.lexsort((first[slots], stratum[slots]))]
        stratum, first = stratum[slots], first[slots]
        latest = np.maximum(last[slots[1:]], last[slots[:-1]])
        near = (latest - first[:-1] <= _NEAR * (now - latest)) & (stratum[1:] == stratum[:-1])
        at_risk = np.asarray(self.at_risk)
        kept = at_risk[slots] != 0
        by_row, order, keeps = self.by_row, slots.tolist(), kept.data  # read and written one by one below
        for at in (~kept).nonzero()[0].tolist():
            cohort = by_row[order[at]]
            keeps[at] = cohort is not None and bool(cohort.heap)
        for at in (near.nonzero()[0] + 1).tolist():
            if keeps[at]:
                before = at - 1
                while before >= 0 and not keeps[before]:
                    before -= 1
                keeps[at] = before < 0 or not self._join(order[before], order[at], now)
        dropped = slots[~kept]
        self._unused += (rows := dropped.tolist())
        for slot in rows:
            by_row[slot] = None
        np.asarray(self.listed)[dropped] = 0
        at_risk[dropped] = 0.0
        self._begun = []
        self._sorted = slots = slots[kept]
        return stratum[kept], now - (first[kept] + last[slots]) / 2, at_risk[slots]

    def _join(self, before: int, at: int, now: float) -> bool:
        """Merge a cohort into an older one, if that is near and of the same stratum."""
        older, newer, last = self.by_row[before], self.by_row[at], max(self.last[before], self.last[at])
        if older is None or newer is None or older.stratum != newer.stratum:
            return False
        if last - self.first[before] > _NEAR * (now - last):
            return False
        self.last[before] = last
        self.at_risk[before] += self.at_risk[at]
        newer.into = older
        if newer.heap:
            if older.heap:
                older.heap += newer.heap
                heapify(older.heap)
            else:
                older.heap = newer.heap
            newer.heap = []
            if not self.listed[before]:
                self.list_leaves(before)
        return True
