"""The pages of a trace as runs: stretches of pages that the same requests use, from the first to the last.

They are the edges of the path-compressed tree of all prompts, at most two for each request. The pages of a
run have the same uses, and so the same next use: a replay by runs gives what one page by page gives, and
takes the time and memory of the trace's branches, not of its tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costcache.radix.node import shared_pages
from costcache.sim.reuse import reuse_pairs

if TYPE_CHECKING:
    from costcache.sim.trace import PageKeys

__all__ = ["PageRuns", "page_runs"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PageRuns:
    """The whole pages of all prompts, run by run.

    Attributes:
        visits: The runs of each prompt, from the root down, all prompts concatenated, int64 of shape
            [visits].
        offsets: int64 of shape [requests + 1]; request i uses ``visits[offsets[i]:offsets[i + 1]]``.
        ends: Pages from the root to the end of each run, int64 of shape [runs].
        lengths: Pages of each run, int64 of shape [runs].
    """

    visits: Int64
    offsets: Int64
    ends: Int64
    lengths: Int64

    @property
    def requests(self) -> Int64:
        """The request of each visit, int64 of shape [visits]."""
        return np.repeat(np.arange(self.offsets.size - 1), np.diff(self.offsets))

    @property
    def distinct(self) -> int:
        """Distinct pages."""
        return int(self.lengths.sum())

    @cached_property
    def following(self) -> Int64:
        """The request that visits the run of each visit next, int64 of shape [visits]; requests for none."""
        requests = self.offsets.size - 1
        request = self.requests
        earlier, later = reuse_pairs(self.visits)
        following = np.full(self.visits.size, requests, np.int64)
        following[earlier] = request[later]
        return following


def page_runs(keys: PageKeys) -> PageRuns:
    """Find the runs of all prompts: O(bytes) to compare them, and O(1) for each run of each prompt."""
    page_bytes = keys.bytes_per_page
    # Runs by number; 0 is the root. A run that is split keeps its number as the tail.
    parts: list[bytes] = [b""]
    parents = array("q", [0])
    children: list[dict[bytes, int]] = [{}]
    last = array("q")
    for view in keys:
        key = bytes(view)
        run, at, size = 0, 0, len(key)
        while at < size:
            first = key[at : at + page_bytes]
            child = children[run].get(first)
            if child is None:
                parts.append(key[at:])
                parents.append(run)
                children.append({})
                children[run][first] = run = len(parts) - 1
                break
            part = parts[child]
            if key.startswith(part, at):
                run = child
                at += len(part)
                continue
            rest = key[at : at + len(part)]
            shared = shared_pages(bytearray(part), rest, page_bytes) * page_bytes
            head = len(parts)
            parts.append(part[:shared])
            parents.append(run)
            children.append({part[shared : shared + page_bytes]: child})
            children[run][first] = head
            parts[child] = part[shared:]
            parents[child] = head
            run = head
            at += shared
        last.append(run)
    lengths = np.array([len(part) // page_bytes for part in parts], np.int64)
    visits, offsets = _paths(last, parents)
    ends = np.zeros_like(lengths)  # of the root, too, which no prompt visits
    # A prompt's runs follow each other, so their ends are the running sum of their lengths.
    total = np.cumsum(lengths[visits])
    before = np.concatenate(([0], total))[offsets[:-1]]
    ends[visits] = total - np.repeat(before, np.diff(offsets))
    return PageRuns(visits, offsets, ends, lengths)


def _paths(last: array[int], parents: array[int]) -> tuple[Int64, Int64]:
    """The runs from the root down to the last one of each prompt, and where each prompt's begin."""
    visits, offsets = array("q"), array("q", [0])
    for end in last:
        path, run = array("q"), end
        while run:
            path.append(run)
            run = parents[run]
        path.reverse()
        visits.extend(path)
        offsets.append(len(visits))
    return _integers(visits), _integers(offsets)


def _integers(column: array[int]) -> Int64:
    return np.frombuffer(column, np.int64) if column else np.empty(0, np.int64)
