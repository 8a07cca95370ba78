"""Adds hints to a trace, true ones or lies: when each prompt is continued, read off the trace's future."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from costcache.sim.paths import page_paths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costcache.sim.trace import Trace

__all__ = ["Hinting", "with_hints"]

Hinting = Literal["right", "reversed", "random", "half"]
"""Kinds of hints, see :func:`with_hints`."""

_FACTOR = 3.0


def with_hints(trace: Trace, kind: Hinting, seed: int = 0) -> Trace:
    """Add what clients would say when each request ends.

    A prompt is continued by the next request whose prompt begins with all of its whole blocks. A client says
    in how many seconds that will be, or that the session ends if it never will be.

    Args:
        trace: The requests, in order of time.
        kind: ``right``: within a factor of three, uniform in the logarithm. ``half``: the same for half of
            the requests, nothing for the others. ``reversed``: the longest for what comes back first and so
            on, and an end of the session for the first half of it. ``random``: those of other requests.
        seed: Seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    seconds = _seconds_to_next(trace)
    count = len(seconds)
    if kind == "reversed":
        # The order of the values is turned round: what never comes back is said to come back at once.
        order = np.argsort(seconds, kind="stable")
        seconds[order] = np.sort(seconds)[::-1]
    elif kind == "random":
        seconds = rng.permutation(seconds)
    ends = np.isinf(seconds)
    said = np.where(ends, np.nan, seconds) * _FACTOR ** rng.uniform(-1.0, 1.0, count)
    if kind == "half":
        silent = rng.random(count) < 0.5
        ends &= ~silent
        said[silent] = np.nan
    return replace(trace, session_ends=ends, returns_after=said)


def _seconds_to_next(trace: Trace) -> NDArray[np.float64]:
    """Seconds from each request to the one that continues its prompt; infinite if none does."""
    paths = page_paths(trace.page_keys(trace.block_size))
    times, edges = trace.timestamps.tolist(), paths.offsets.tolist()
    seen = np.full(paths.distinct, np.inf)
    found = np.full(len(trace), np.inf)
    for number in reversed(range(len(trace))):
        pages = paths.paths[edges[number] : edges[number + 1]]
        if len(pages):
            found[number] = seen[pages[-1]] - times[number]
            seen[pages] = times[number]
    return found
