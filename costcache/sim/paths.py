"""The pages of a trace, each as the number of its path from the root.

Two pages are one cache entry if their whole prefixes are equal. With paths numbered once, a replay page by
page is arithmetic on integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costcache.sim.runs import page_runs

if TYPE_CHECKING:
    from costcache.sim.trace import PageKeys

__all__ = ["PageOutcome", "PagePaths", "page_paths"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class PagePaths:
    """The whole pages of all prompts, concatenated.

    Attributes:
        paths: Number of each page's path, from 0, int64 of shape [pages].
        parents: Number of each path's parent, -1 for a first page, int64 of shape [distinct].
        offsets: int64 of shape [requests + 1]; request i has ``paths[offsets[i]:offsets[i + 1]]``.
        distinct: Number of distinct paths.
    """

    paths: Int64
    parents: Int64
    offsets: Int64
    distinct: int


@dataclass(frozen=True, eq=False, slots=True)
class PageOutcome:
    """The outcome of one policy at one capacity, counted in pages.

    Attributes:
        matched: Pages that each request hit, int64 of shape [requests].
        shortfall: Pages needed beyond the free ones; all that a request misses count,
            even if it is longer than the pool.
        evicted: Pages evicted.
        evictions: Requests that had a shortfall.
        oversized: Requests longer than the pool.
    """

    matched: Int64
    shortfall: int
    evicted: int
    evictions: int
    oversized: int


def page_paths(keys: PageKeys) -> PagePaths:
    """Number the paths of all pages, those of a run one after another: O(bytes), like :func:`page_runs`."""
    runs = page_runs(keys)
    visits, starts = runs.visits, runs.offsets[:-1]
    first = np.cumsum(runs.lengths) - runs.lengths
    sizes = runs.lengths[visits]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    paths = np.repeat(first[visits] - ends[:-1], sizes) + np.arange(ends[-1])
    parents = np.arange(-1, runs.distinct - 1)
    above = np.empty_like(visits)
    above[1:] = (first + runs.lengths - 1)[visits[:-1]]
    above[starts[np.diff(runs.offsets) > 0]] = -1
    parents[first[visits]] = above
    return PagePaths(paths, parents, ends[runs.offsets], runs.distinct)
