"""Openings: traces up to some time after a pool first fills, from several seeds of a workload or places."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from _report import recorded_traces
from _workloads import FILES, HELD_OUT_FILES, generated, later
from policies import MODEL

from costcache.deployment import Deployment
from costcache.sim.engine import Simulator
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace

__all__ = ["ALL_FILES", "Opening", "openings"]

ALL_FILES = FILES | HELD_OUT_FILES
LEAST = 250
"""Requests after the pool first fills that an opening has at least."""


@dataclass(frozen=True, slots=True)
class Opening:
    """One trace at one pool size.

    Attributes:
        workload: Name of the workload.
        start: Seed of a generated workload; place in a recorded one, in tenths of its requests.
        percent: Pool in % of the distinct whole pages of the whole trace.
        capacity: The same in tokens.
        fill: Number of the first request at which a victim is asked for.
        simulator: Replays the trace up to some requests after that.
    """

    workload: str
    start: int
    percent: int
    capacity: int
    fill: int
    simulator: Simulator


def openings(workload: str, starts: Sequence[int], pools: Sequence[int], requests: int) -> Iterator[Opening]:
    """Yield the openings of one workload that have enough requests; a recorded one may be missing.

    Args:
        workload: Its name.
        starts: Seeds or places; a recorded trace is taken from so many tenths of its requests.
        pools: Pool sizes in %.
        requests: Requests after the pool first fills that an opening has at most.
    """
    whole, page = None, 16
    if workload in ALL_FILES:
        file, page = ALL_FILES[workload]
        path = recorded_traces() / file
        if not path.is_file():
            print(f"{path} is missing: {workload} is skipped", file=sys.stderr)
            return
        whole = load_trace(path, tokenizer="words" if page == 16 else None).in_time_order()
    for start in starts:
        if whole is None:
            trace = generated(workload, 0, start)
            pages = trace.distinct_pages(page)
        else:
            pages = whole.distinct_pages(page)
            trace = later(whole, start)
        seen = _distinct(trace, page)
        for percent in pools:
            fill = int(np.searchsorted(seen, pages * percent // 100, side="right"))
            if fill + LEAST > len(trace):
                continue
            opening = trace.take(np.arange(min(len(trace), fill + requests)))
            simulator = Simulator(opening, MODEL, Deployment(page_size=page))
            yield Opening(workload, start, percent, pages * percent // 100 * page, fill, simulator)


def _distinct(trace: Trace, page: int) -> np.ndarray:
    """Distinct whole pages of each request and those before it: what a pool without limit would hold."""
    paths = Simulator(trace, MODEL, Deployment(page_size=page)).paths
    first = np.unique(paths.paths, return_index=True)[1]
    return np.searchsorted(np.sort(first), paths.offsets[1:])
