"""The pages of a trace, each as the number of its path from the root.

Two pages are one cache entry if their whole prefixes are equal. With paths numbered once, a replay page by
page is arithmetic on integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
    """Number the paths of all pages.

    If ids name pages together with their prefix, pages are paths already. Otherwise paths are numbered
    level by level: at each depth, a path is the pair of its parent's path and its page.
    """
    lengths = keys.tokens // keys.page_size
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    pages = _page_numbers(keys, int(offsets[-1]))
    named = _already_paths(pages, offsets)
    if named is not None:
        return PagePaths(pages, named, offsets, named.size)
    paths = np.empty(pages.size, np.int64)
    parents: list[Int64] = []
    distinct = 0
    active = np.flatnonzero(lengths)
    parent = np.full(active.size, -1, np.int64)
    span = int(pages.max()) + 1 if pages.size else 1
    depth = 0
    while active.size:
        at = offsets[active] + depth
        # Parents are numbered densely within the level, so the pair fits 64 bits.
        names, first, inverse = np.unique(
            (parent - parent.min()) * span + pages[at], return_index=True, return_inverse=True
        )
        paths[at] = distinct + inverse
        parents.append(parent[first])
        longer = lengths[active] > depth + 1
        active, parent = active[longer], distinct + inverse[longer]
        distinct += names.size
        depth += 1
    return PagePaths(paths, np.concatenate(parents) if parents else np.empty(0, np.int64), offsets, distinct)


def _already_paths(pages: Int64, offsets: Int64) -> Int64 | None:
    """The parent of each page, -1 for a first page; None if some page has more than one parent."""
    if not pages.size:
        return None
    before = np.empty_like(pages)
    before[1:] = pages[:-1]
    before[offsets[:-1][np.diff(offsets) > 0]] = -1
    parents = np.empty(int(pages.max()) + 1, np.int64)
    parents[pages] = before
    return parents if np.array_equal(parents[pages], before) else None


def _page_numbers(keys: PageKeys, pages: int) -> Int64:
    """Each page as a dense number; numbers are equal where the bytes are."""
    raw = b"".join(keys)
    if keys.units_per_page == 1:
        names = np.frombuffer(raw, np.int64)
    else:
        names = np.frombuffer(raw, np.dtype((np.void, keys.bytes_per_page)))
    if not pages:
        return np.empty(0, np.int64)
    if keys.units_per_page == 1 and names.min() >= 0 and names.max() < 4 * pages:
        used = np.zeros(int(names.max()) + 1, bool)
        used[names] = True
        numbers: Int64 = (np.cumsum(used) - 1)[names]
        return numbers
    return np.unique(names, return_inverse=True)[1].astype(np.int64, copy=False)
