"""What a trace holds: sizes, the best hit rate possible, when and how deep its pages are used again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costcache.sim.paths import page_paths
from costcache.sim.reuse import previous_use
from costcache.sim.trace import Trace

__all__ = ["DepthBin", "IntervalBin", "TraceSummary", "ideal_with_outputs", "summarize"]

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class IntervalBin:
    """Uses of pages that come a certain time after the last use of the same page.

    Attributes:
        start: Seconds from which on, inclusive.
        stop: Seconds up to which, exclusive.
        uses: Pages used again after that time.
    """

    start: float
    stop: float
    uses: int


@dataclass(frozen=True, slots=True)
class DepthBin:
    """Pages that begin at a certain depth of their prompt.

    Attributes:
        start: Tokens before the page from which on, inclusive.
        stop: Tokens up to which, exclusive.
        pages: Pages of all prompts.
        found: Those of them that a cache without limit has.
    """

    start: int
    stop: int
    pages: int
    found: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace in numbers.

    Attributes:
        name: The trace's name.
        requests: Requests.
        sessions: Sessions; None where the trace does not say.
        input_tokens: Prompt tokens of all requests.
        output_tokens: Generated tokens of all requests.
        longest_input: Prompt tokens of the longest request.
        duration_seconds: From the first arrival to the last.
        block_size: Tokens per block id.
        page_size: Tokens per page of all that follows.
        pages: Whole pages of all prompts.
        distinct_pages: Different ones, by their path from the root.
        ideal_token_hit_rate: Share of the prompt tokens that a cache without limit finds, which keeps
            the whole pages of prompts.
        ideal_with_outputs: The same of one that keeps generated tokens too; None where those are not
            known.
        reuse_intervals: Reuse by the seconds since the last use, in powers of two.
        depths: Pages by the tokens before them, in powers of two.
        finish: Requests of each recorded stop reason.
    """

    name: str
    requests: int
    sessions: int | None
    input_tokens: int
    output_tokens: int
    longest_input: int
    duration_seconds: float
    block_size: int
    page_size: int
    pages: int
    distinct_pages: int
    ideal_token_hit_rate: float
    ideal_with_outputs: float | None
    reuse_intervals: tuple[IntervalBin, ...]
    depths: tuple[DepthBin, ...]
    finish: dict[str, int]


def summarize(trace: Trace, page_size: int) -> TraceSummary:
    """Describe a trace, in pages of ``page_size`` tokens.

    Raises:
        TraceError: ``page_size`` is under 1.
    """
    paths = page_paths(trace.page_keys(page_size))
    counts = np.diff(paths.offsets)
    previous = previous_use(paths.paths)
    again = np.flatnonzero(previous >= 0)
    times = np.repeat(trace.timestamps, counts)
    depths = (np.arange(len(paths.paths)) - np.repeat(paths.offsets[:-1], counts)) * page_size
    total = int(trace.input_tokens.sum())
    finish = {}
    if trace.finish is not None:
        known = np.bincount(trace.finish[trace.finish >= 0], minlength=len(trace.finish_names))
        finish = dict(zip(trace.finish_names, known.tolist(), strict=True))
    return TraceSummary(
        name=trace.name,
        requests=len(trace),
        sessions=None if trace.sessions is None else len(np.unique(trace.sessions)),
        input_tokens=total,
        output_tokens=int(trace.output_tokens.sum()),
        longest_input=int(trace.input_tokens.max(initial=0)),
        duration_seconds=float(np.ptp(trace.timestamps)) if len(trace) else 0.0,
        block_size=trace.block_size,
        page_size=page_size,
        pages=len(paths.paths),
        distinct_pages=paths.distinct,
        ideal_token_hit_rate=len(again) * page_size / total if total else 0.0,
        ideal_with_outputs=ideal_with_outputs(trace, page_size),
        reuse_intervals=_intervals(times[again] - times[previous[again]]),
        depths=_depths(depths, depths[again], page_size),
        finish=finish,
    )


def ideal_with_outputs(trace: Trace, page_size: int) -> float | None:
    """Share of the prompt tokens that a cache without limit finds which keeps generated tokens too.

    A prompt's pages are found where an earlier request, in the order of the trace, had them as prompt
    or as prompt and output. None where generated tokens are not known.

    Raises:
        TraceError: ``page_size`` is under 1.
    """
    left = trace.with_outputs()
    if left is None:
        return None
    requests = len(trace)
    # Each request twice: as it asks, and as it leaves the cache.
    twice = np.arange(2 * requests).reshape(2, -1).T.ravel()
    both = Trace(
        name=trace.name,
        block_size=trace.block_size,
        timestamps=np.tile(trace.timestamps, 2),
        input_tokens=np.concatenate((trace.input_tokens, left.input_tokens)),
        output_tokens=np.zeros(2 * requests, np.int64),
        ids=np.concatenate((trace.ids, left.ids)),
        offsets=np.concatenate((trace.offsets, left.offsets[1:] + len(trace.ids))),
    ).take(twice)
    paths = page_paths(both.page_keys(page_size))
    asks = np.repeat(np.arange(2 * requests) % 2 == 0, np.diff(paths.offsets))
    found = int(np.count_nonzero(previous_use(paths.paths)[asks] >= 0))
    total = int(trace.input_tokens.sum())
    return found * page_size / total if total else 0.0


def _intervals(seconds: Float64) -> tuple[IntervalBin, ...]:
    """Under a second, then in powers of two; empty bins at the end are left out."""
    exponents = np.zeros(len(seconds), dtype=np.int64)
    longer = seconds >= 1.0
    exponents[longer] = np.floor(np.log2(seconds[longer])).astype(np.int64) + 1
    counts = np.bincount(exponents).tolist() if len(seconds) else []
    return tuple(
        IntervalBin(0.0 if k == 0 else 2.0 ** (k - 1), 2.0**k, count) for k, count in enumerate(counts)
    )


def _depths(depths: Int64, found: Int64, page_size: int) -> tuple[DepthBin, ...]:
    """The first page, then in powers of two of pages."""
    if not len(depths):
        return ()
    edges = [0, page_size]
    while edges[-1] <= int(depths.max()):
        edges.append(edges[-1] * 2)
    pages, hits = (np.histogram(column, edges)[0].tolist() for column in (depths, found))
    return tuple(
        DepthBin(start, stop, asked, hit)
        for start, stop, asked, hit in zip(edges, edges[1:], pages, hits, strict=False)
    )
