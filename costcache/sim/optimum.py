"""The offline optimum, which no online policy can beat.

Belady's rule (1966) on the pages of a prefix tree: evict the page whose next use is furthest in the future.
Every use of a page is a use of its ancestors, so its next use is never earlier than theirs; with ties
broken by depth, the deepest first, every victim is a leaf. For hits in whole pages, with every miss
inserted, the rule is exact: all pages are of one size, and the tree never rules out its victim.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from costcache.sim.loop import numbered
from costcache.sim.paths import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.sim.runs import PageRuns

__all__ = ["optimum"]

_STALE = 4096


def optimum(
    runs: PageRuns, capacity: int | None, progress: Callable[[int], None] | None = None
) -> PageOutcome:
    """Replay a trace, knowing its future.

    All pages of a run have the same next use, so the pool has the beginning of each run, and a victim is the
    end of one.

    Args:
        runs: The trace's pages.
        capacity: Pages in the pool; None for no limit.
        progress: Called now and then with the number of requests done since the last call.
    """
    offsets = runs.offsets.tolist()
    requests = len(offsets) - 1
    free = runs.distinct if capacity is None else capacity
    lengths, ends = runs.lengths.tolist(), runs.ends.tolist()
    # One number per use: the request of the next use, then the depth. The largest is evicted first.
    scale = int(runs.ends.max(initial=0)) + 1
    ranks = runs.following * -scale - runs.ends[runs.visits]
    cached = [0] * len(lengths)  # pages of each run, from its first
    heap: list[tuple[int, int]] = []
    matched: list[int] = []
    live = 0
    evicted = evictions = missing = oversized = 0
    for request, (start, stop) in numbered(pairwise(offsets), requests, progress):
        # Request by request, since all visits as Python integers would take ten times the memory.
        path, ranked = runs.visits[start:stop].tolist(), ranks[start:stop].tolist()
        length = ends[path[-1]] if path else 0
        found = 0
        for run in path:
            found += cached[run]
            if cached[run] < lengths[run]:
                break
        matched.append(found)
        oversized += capacity is not None and length > capacity
        shortfall = length - found - free
        if shortfall > 0:
            # The next use of this request's own pages is this very request, the lowest of all: they are not
            # evicted.
            in_use = -(request + 1) * scale
            missing += shortfall
            evictions += 1
            while shortfall and heap and heap[0][0] <= in_use:
                victim = heap[0][1]
                taken = min(shortfall, cached[victim])
                cached[victim] -= taken
                if not cached[victim]:
                    heapq.heappop(heap)
                    live -= 1
                evicted += taken
                free += taken
                shortfall -= taken
            length -= shortfall  # only the head fits
        free -= length - found
        for rank, run in zip(ranked, path, strict=True):
            fits = min(lengths[run], length)
            if not fits:
                break
            length -= fits
            live += not cached[run]
            cached[run] = fits
            heapq.heappush(heap, (rank, run))
        if len(heap) > 2 * live + _STALE:  # most entries are stale: the next use is past
            bound = -(request + 1) * scale
            heap = [entry for entry in heap if entry[0] <= bound]
            heapq.heapify(heap)
    return PageOutcome(np.array(matched, np.int64), missing, evicted, evictions, oversized)
