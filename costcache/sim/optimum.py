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
from numpy.typing import NDArray

from costcache.sim.loop import numbered
from costcache.sim.paths import PageOutcome
from costcache.sim.reuse import reuse_pairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.sim.paths import PagePaths

__all__ = ["next_requests", "optimum"]

_STALE = 4096


def optimum(
    paths: PagePaths, capacity: int | None, progress: Callable[[int], None] | None = None
) -> PageOutcome:
    """Replay a trace, knowing its future.

    Args:
        paths: The trace's pages.
        capacity: Pages in the pool; None for no limit.
        progress: Called now and then with the number of requests done since the last call.
    """
    offsets = paths.offsets.tolist()
    requests = len(offsets) - 1
    lengths = np.diff(paths.offsets)
    free = size = paths.distinct if capacity is None else capacity
    # One number per use: the request of the next use, then the depth. The largest is evicted first.
    scale = int(lengths.max(initial=0)) + 1
    depths = np.arange(paths.paths.size) - np.repeat(paths.offsets[:-1], lengths)
    ranks = next_requests(paths, requests)
    ranks *= -scale
    ranks -= depths
    del depths
    cached = bytearray(paths.distinct)
    heap: list[tuple[int, int]] = []
    matched: list[int] = []
    evicted = evictions = missing = oversized = 0
    for request, (start, stop) in numbered(pairwise(offsets), requests, progress):
        # Request by request, since all pages as Python integers would take ten times the memory.
        pages, ranked = paths.paths[start:stop].tolist(), ranks[start:stop].tolist()
        length = stop - start
        found = 0
        while found < length and cached[pages[found]]:
            found += 1
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
                cached[heapq.heappop(heap)[1]] = 0
                evicted += 1
                free += 1
                shortfall -= 1
            length -= shortfall  # only the head fits
        free -= length - found
        for rank, page in zip(ranked[:length], pages, strict=False):
            cached[page] = 1
            heapq.heappush(heap, (rank, page))
        if len(heap) > 2 * (size - free) + _STALE:  # most entries are stale: the next use is past
            bound = -(request + 1) * scale
            heap = [entry for entry in heap if entry[0] <= bound]
            heapq.heapify(heap)
    return PageOutcome(np.array(matched, np.int64), missing, evicted, evictions, oversized)


def next_requests(paths: PagePaths, never: int) -> NDArray[np.int64]:
    """The request of each page's next use, ``never`` if it has none; int64 of shape [pages]."""
    request = np.repeat(np.arange(paths.offsets.size - 1), np.diff(paths.offsets))
    earlier, later = reuse_pairs(paths.paths)
    following = np.full(paths.paths.size, never, np.int64)
    following[earlier] = request[later]
    return following
