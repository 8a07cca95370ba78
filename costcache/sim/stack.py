"""LRU at every capacity in one pass, by stack distances.

With the tail of the last victim trimmed, LRU over a prefix tree is LRU over pages: a request
touches its pages from the deepest to the first, so that the first is the most recent, and the pool
holds the top of one stack whatever its capacity (Mattson et al. 1970). A page is found when at most
as many pages as the pool holds were used since its own last use, itself included.

A request longer than the pool keeps its head, which is what the top of the stack holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costcache.sim.paths import PageRun

if TYPE_CHECKING:
    from costcache.sim.paths import PagePaths

__all__ = ["LRUCurve", "deepest_first"]

Int64 = NDArray[np.int64]


class LRUCurve:
    """Stack distances of a trace, from which any capacity is read.

    Attributes:
        distances: Of each page, how many pages the pool must hold for it to be found; one more than
            there are distinct pages for a first use. int64 of shape [pages].
    """

    def __init__(self, paths: PagePaths) -> None:
        """Compute the distances: O(pages log pages), in numpy."""
        self._offsets = paths.offsets
        self._lengths = np.diff(paths.offsets)
        self._distinct = paths.distinct
        order = deepest_first(paths.offsets)
        previous = _previous_use(paths.paths[order])
        starts = np.repeat(paths.offsets[:-1], self._lengths)
        # Where the page behind was last used just before this page, its distance is one more: only the
        # last (least deep) page of such a run needs a query.
        follows = np.zeros(order.size, bool)
        follows[:-1] = (previous[:-1] + 1 == previous[1:]) & (starts[:-1] == starts[1:])
        follows &= previous >= 0
        heads = np.flatnonzero((previous >= 0) & ~follows)
        # Pages used in [p, s): uses in between, less those that another use before s repeats.
        used = starts[heads] - previous[heads] - _repeats(previous, starts[heads], previous[heads])
        positions = np.flatnonzero(previous >= 0)
        run = np.searchsorted(heads, positions)
        self.distances = np.full(order.size, paths.distinct + 1, np.int64)
        self.distances[order[positions]] = used[run] + heads[run] - positions
        fresh = np.zeros(order.size, np.int64)
        fresh[order] = previous < 0
        counted = np.concatenate(([0], np.cumsum(fresh)))
        self._seen_before = counted[paths.offsets[:-1]]

    def hit_pages(self, capacities: Int64) -> Int64:
        """Pages found at each capacity, in pages; int64 of the shape of ``capacities``."""
        limits = np.minimum(capacities, self._distinct)
        return np.searchsorted(np.sort(self.distances), limits, side="right").astype(np.int64)

    def run(self, capacity: int | None) -> PageRun:
        """Read one capacity, in pages; None for no limit."""
        limit = self._distinct if capacity is None else min(capacity, self._distinct)
        hits = np.concatenate(([0], np.cumsum(self.distances <= limit)))
        matched = hits[self._offsets[1:]] - hits[self._offsets[:-1]]
        if capacity is None or capacity >= self._distinct:
            return PageRun(matched, 0, 0, 0, 0)
        new = self._lengths - matched
        kept = np.minimum(self._lengths, capacity) - matched
        held = np.minimum(self._seen_before, capacity)
        short = held + new - capacity
        return PageRun(
            matched=matched,
            shortfall=int(np.maximum(short, 0).sum()),
            evicted=int(kept.sum()) - capacity,
            evictions=int(np.count_nonzero(short > 0)),
            oversized=int(np.count_nonzero(self._lengths > capacity)),
        )


def deepest_first(offsets: Int64) -> Int64:
    """Positions of the pages, request by request, from the deepest page to the first."""
    lengths = np.diff(offsets)
    positions = np.arange(int(offsets[-1]))
    return np.repeat(offsets[:-1] + offsets[1:] - 1, lengths) - positions


def _previous_use(pages: Int64) -> Int64:
    """Position of the use before each, -1 for a first use."""
    order = np.argsort(pages, kind="stable")
    same = pages[order[1:]] == pages[order[:-1]]
    previous = np.full(pages.size, -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _repeats(previous: Int64, stops: Int64, lows: Int64) -> Int64:
    """For each query, how many uses k < stop have ``previous[k] >= low``.

    A wavelet matrix (Claude and Navarro 2012): one bit of the values a level, from the highest, each
    level partitioned by its bit; all queries go down together.
    """
    values = previous + 1
    bounds = lows + 1
    start, stop = np.zeros(stops.size, np.int64), stops.copy()
    counts = np.zeros(stops.size, np.int64)
    highest = max(int(values.max(initial=0)), int(bounds.max(initial=0)))
    for bit in reversed(range(highest.bit_length())):
        ones = (values >> bit) & 1
        zeros_before = np.concatenate(([0], np.cumsum(1 - ones)))
        zeros = int(zeros_before[-1])
        start0, stop0 = zeros_before[start], zeros_before[stop]
        start1, stop1 = zeros + start - start0, zeros + stop - stop0
        up = ((bounds >> bit) & 1).astype(bool)
        counts += np.where(up, 0, stop1 - start1)  # with the bit set where the bound's is not: larger
        start, stop = np.where(up, start1, start0), np.where(up, stop1, stop0)
        values = np.concatenate((values[ones == 0], values[ones == 1]))
    return counts + (stop - start)  # equal to the bound
