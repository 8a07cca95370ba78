"""LRU at one capacity, by a cut that moves through the uses of pages.

As in :mod:`costcache.sim.stack`, LRU over a prefix tree is LRU over pages, each request using its own from
the deepest to the first. Then the pool holds the pages whose last use lies behind a cut, and the
cut only moves on: as far as it takes for no more pages to be behind it than fit. Along a request, last
uses rise from the deepest page to the first, so a bisection says how many of them were found.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from costcache.sim.paths import PageRun
from costcache.sim.stack import deepest_first

if TYPE_CHECKING:
    from costcache.sim.paths import PagePaths

__all__ = ["lru"]


def lru(paths: PagePaths, capacity: int) -> PageRun:
    """Replay a trace once: O(pages), after a sort.

    Args:
        paths: The trace's pages.
        capacity: Pages in the pool.
    """
    pages = paths.paths[deepest_first(paths.offsets)]
    order = np.argsort(pages, kind="stable")
    ranked = pages[order]
    again = np.flatnonzero(ranked[1:] == ranked[:-1])
    previous = np.full(pages.size, -1, np.int64)
    previous[order[again + 1]] = order[again]
    following = np.full(pages.size, pages.size, np.int64)
    following[order[again]] = order[again + 1]
    last, after = previous.tolist(), following.tolist()
    offsets = paths.offsets.tolist()
    matched: list[int] = []
    cut = held = short = evicted = evictions = oversized = 0
    start = 0
    for stop in offsets[1:]:
        # A page that was never used has its last use at -1, in front of any cut.
        behind = bisect_left(last, cut, start, stop)
        matched.append(stop - behind)
        held += behind - start
        if held > capacity:
            over = held - capacity
            short += over
            evictions += 1
            length = stop - start
            if length > capacity:
                oversized += 1
                evicted += over - (length - capacity)  # what never came in was not evicted
            else:
                evicted += over
            while held > capacity:
                if after[cut] >= stop:  # used again by now, it counts there
                    held -= 1
                cut += 1
        start = stop
    return PageRun(np.array(matched, np.int64), short, evicted, evictions, oversized)
