"""LRU page by page: at every capacity in one pass by stack distances, or at one capacity in less.

With the last victim's tail trimmed, LRU over a prefix tree is LRU over pages: a request touches its
pages from the deepest to the first, so the first page is the most recent one, and at any capacity the
pool holds the top of one and the same stack (Mattson et al. 1970). A page hits if the distinct pages used
since its previous use, itself included, fit into the pool.

A request longer than the pool keeps its head, which is the top of the stack.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costcache.sim.paths import PageOutcome
from costcache.sim.reuse import Positions, index_type, previous_use, reuse_pairs

if TYPE_CHECKING:
    from costcache.sim.paths import PagePaths

__all__ = ["LRUCurve", "lru"]

Int64 = NDArray[np.int64]


class LRUCurve:
    """Stack distances of a trace, from which LRU is read off at any capacity.

    Attributes:
        distances: The least capacity, in pages, at which each page hits; for a first use, one more than
            the number of distinct pages. int64 of shape [pages].
    """

    def __init__(self, paths: PagePaths) -> None:
        """Compute the distances: O(pages log pages), in numpy."""
        self._offsets = paths.offsets
        self._lengths = np.diff(paths.offsets)
        self._distinct = paths.distinct
        order = _deepest_first(paths.offsets)
        previous = previous_use(paths.paths[order])
        starts = np.repeat(paths.offsets[:-1].astype(order.dtype), self._lengths)
        # If the next deeper page's previous use came just before this page's, its distance is one more:
        # of such a stretch of pages, only the last (the least deep) needs a query.
        follows = np.zeros(order.size, bool)
        follows[:-1] = (previous[:-1] + 1 == previous[1:]) & (starts[:-1] == starts[1:])
        follows &= previous >= 0
        heads = np.flatnonzero((previous >= 0) & ~follows)
        # Distinct pages used in [p, s): the uses in between, less those that repeat within [p, s).
        used = starts[heads] - previous[heads] - _repeats(previous, starts[heads], previous[heads])
        positions = np.flatnonzero(previous >= 0)
        stretch = np.searchsorted(heads, positions)
        self.distances = np.full(order.size, paths.distinct + 1, np.int64)
        self.distances[order[positions]] = used[stretch] + heads[stretch] - positions
        fresh = np.zeros(order.size, bool)
        fresh[order] = previous < 0
        counted = np.concatenate(([0], np.cumsum(fresh)))
        self._seen_before = counted[paths.offsets[:-1]]

    def hit_pages(self, capacities: Int64) -> Int64:
        """Pages that hit at each capacity, in pages; int64 of the shape of ``capacities``."""
        limits = np.minimum(capacities, self._distinct)
        return np.searchsorted(np.sort(self.distances), limits, side="right").astype(np.int64)

    def at(self, capacity: int | None) -> PageOutcome:
        """Read off one capacity, in pages; None for no limit."""
        limit = self._distinct if capacity is None else min(capacity, self._distinct)
        hits = np.concatenate(([0], np.cumsum(self.distances <= limit)))
        matched = hits[self._offsets[1:]] - hits[self._offsets[:-1]]
        if capacity is None or capacity >= self._distinct:
            return PageOutcome(matched, 0, 0, 0, 0)
        new = self._lengths - matched
        kept = np.minimum(self._lengths, capacity) - matched
        cached = np.minimum(self._seen_before, capacity)
        short = cached + new - capacity
        return PageOutcome(
            matched=matched,
            shortfall=int(np.maximum(short, 0).sum()),
            evicted=int(kept.sum()) - capacity,
            evictions=int(np.count_nonzero(short > 0)),
            oversized=int(np.count_nonzero(self._lengths > capacity)),
        )


def lru(paths: PagePaths, capacity: int) -> PageOutcome:
    """Replay LRU once, at one capacity: O(pages), after a sort.

    The pool has the pages whose last use is after a cut in the sequence of uses. The cut only moves forward,
    as far as it takes for the pages after it to fit. Within a request, last uses rise from the deepest page
    to the first, so a bisection counts the hits.

    Args:
        paths: The trace's pages.
        capacity: Pages in the pool.
    """
    pages = paths.paths[_deepest_first(paths.offsets)]
    earlier, later = reuse_pairs(pages)
    kind = index_type(pages.size)
    previous: Positions = np.full(pages.size, -1, kind)
    previous[later] = earlier
    following: Positions = np.full(pages.size, pages.size, kind)
    following[earlier] = later
    last, after = previous.data, following.data  # lists would take ten times the memory
    offsets = paths.offsets.tolist()
    matched: list[int] = []
    cut = cached = short = evicted = evictions = oversized = 0
    start = 0
    for stop in offsets[1:]:
        # The last use of a page never used before is -1, which is before any cut.
        first = bisect_left(last, cut, start, stop)
        matched.append(stop - first)
        cached += first - start
        if cached > capacity:
            over = cached - capacity
            short += over
            evictions += 1
            length = stop - start
            if length > capacity:
                oversized += 1
                evicted += over - (length - capacity)  # pages that never fitted were not evicted
            else:
                evicted += over
            while cached > capacity:
                if after[cut] >= stop:  # no later use so far: this was the page's last
                    cached -= 1
                cut += 1
        start = stop
    return PageOutcome(np.array(matched, np.int64), short, evicted, evictions, oversized)


def _deepest_first(offsets: Int64) -> Positions:
    """Positions of the pages, request by request, from the deepest page to the first."""
    count = int(offsets[-1])
    return (np.repeat(offsets[:-1] + offsets[1:] - 1, np.diff(offsets)) - np.arange(count)).astype(
        index_type(count)
    )


def _repeats(previous: Positions, stops: Positions, lows: Positions) -> Positions:
    """Count, for each query, the uses k < stop with ``previous[k] >= low``.

    A wavelet matrix (Claude and Navarro 2012): one bit of the values a level, from the highest, each
    level partitioned by its bit; all queries descend together.
    """
    values = previous + 1
    bounds = lows + 1
    start, stop = np.zeros_like(stops), stops.copy()
    counts = np.zeros_like(stops)
    highest = max(int(values.max(initial=0)), int(bounds.max(initial=0)))
    for bit in reversed(range(highest.bit_length())):
        zero = (values >> bit) & 1 == 0
        zeros_before = np.zeros(values.size + 1, values.dtype)
        np.cumsum(zero, out=zeros_before[1:])
        zeros = int(zeros_before[-1])
        start0, stop0 = zeros_before[start], zeros_before[stop]
        start1, stop1 = zeros + start - start0, zeros + stop - stop0
        up = ((bounds >> bit) & 1).astype(bool)
        counts += np.where(up, 0, stop1 - start1)  # with the bit set where the bound's is not: larger
        start, stop = np.where(up, start1, start0), np.where(up, stop1, stop0)
        values = np.concatenate((values[zero], values[~zero]))
    return counts + (stop - start)  # equal to the bound
