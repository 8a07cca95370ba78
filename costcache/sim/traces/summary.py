"""Summarizes a trace: sizes, the ideal hit rate, reuse intervals and reuse by depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costcache.sim.reuse import previous_use
from costcache.sim.runs import page_runs
from costcache.sim.trace import Trace

__all__ = ["DepthBin", "IntervalBin", "TraceSummary", "ideal_with_outputs", "summarize"]

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class IntervalBin:
    """Reuses of pages within a range of reuse intervals.

    Attributes:
        start: Shortest interval in seconds, inclusive.
        stop: Longest interval in seconds, exclusive.
        uses: Page uses after such an interval.
    """

    start: float
    stop: float
    uses: int


@dataclass(frozen=True, slots=True)
class DepthBin:
    """Pages of prompts within a range of depths.

    Attributes:
        start: Fewest tokens before the page, inclusive.
        stop: Most tokens before the page, exclusive.
        pages: Pages of all prompts.
        found: Those of them that hit in an unlimited cache.
    """

    start: int
    stop: int
    pages: int
    found: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The figures of a trace.

    Attributes:
        name: The trace's name.
        requests: Requests.
        sessions: Sessions; None if not recorded.
        input_tokens: Prompt tokens of all requests.
        output_tokens: Generated tokens of all requests.
        longest_input: Prompt tokens of the longest request.
        duration_seconds: From the first arrival to the last.
        block_size: Tokens per block id.
        page_size: Tokens per page, for the fields that follow.
        pages: Whole pages of all prompts.
        distinct_pages: Distinct ones, by their path from the root.
        ideal_token_hit_rate: Share of the prompt tokens that hit in an unlimited cache of the whole pages
            of prompts.
        ideal_with_outputs: The same if generated tokens are cached too; None if they are unknown.
        reuse_intervals: Reuses by the seconds since the last use, in powers of two.
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
    """Summarize a trace, in pages of ``page_size`` tokens.

    Raises:
        TraceError: If ``page_size`` is under 1.
    """
    runs = page_runs(trace.page_keys(page_size))
    previous = previous_use(runs.visits)
    again = np.flatnonzero(previous >= 0)
    times = trace.timestamps[runs.requests]
    lengths = runs.lengths[runs.visits]
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
        pages=int(lengths.sum()),
        distinct_pages=runs.distinct,
        ideal_token_hit_rate=int(lengths[again].sum()) * page_size / total if total else 0.0,
        ideal_with_outputs=ideal_with_outputs(trace, page_size),
        reuse_intervals=_intervals(times[again] - times[previous[again]], lengths[again]),
        depths=_depths(runs.ends[runs.visits] - lengths, runs.ends[runs.visits], again, page_size),
        finish=finish,
    )


def ideal_with_outputs(trace: Trace, page_size: int) -> float | None:
    """Share of the prompt tokens that hit in an unlimited cache that keeps generated tokens too.

    A page of a prompt hits if an earlier request, in the order of the trace, had it in its prompt or its
    output. None if generated tokens are unknown.

    Raises:
        TraceError: If ``page_size`` is under 1.
    """
    after = trace.with_outputs()
    if after is None:
        return None
    requests = len(trace)
    # Each request twice: as its prompt, and with its output.
    twice = np.arange(2 * requests).reshape(2, -1).T.ravel()
    both = Trace(
        name=trace.name,
        block_size=trace.block_size,
        timestamps=np.tile(trace.timestamps, 2),
        input_tokens=np.concatenate((trace.input_tokens, after.input_tokens)),
        output_tokens=np.zeros(2 * requests, np.int64),
        ids=np.concatenate((trace.ids, after.ids)),
        offsets=np.concatenate((trace.offsets, after.offsets[1:] + len(trace.ids))),
    ).take(twice)
    runs = page_runs(both.page_keys(page_size))
    again = (previous_use(runs.visits) >= 0) & (runs.requests % 2 == 0)
    found = int(runs.lengths[runs.visits[again]].sum())
    total = int(trace.input_tokens.sum())
    return found * page_size / total if total else 0.0


def _intervals(seconds: Float64, pages: Int64) -> tuple[IntervalBin, ...]:
    """Bins: under a second, then in powers of two, up to the longest interval."""
    exponents = np.zeros(len(seconds), dtype=np.int64)
    longer = seconds >= 1.0
    exponents[longer] = np.floor(np.log2(seconds[longer])).astype(np.int64) + 1
    counts = np.bincount(exponents, pages).astype(np.int64).tolist() if len(seconds) else []
    return tuple(
        IntervalBin(0.0 if k == 0 else 2.0 ** (k - 1), 2.0**k, count) for k, count in enumerate(counts)
    )


def _depths(starts: Int64, ends: Int64, again: Int64, page_size: int) -> tuple[DepthBin, ...]:
    """Bins of stretches of pages: the first page, then in powers of two of pages.

    Args:
        starts: Pages before each stretch.
        ends: Pages to its end.
        again: The stretches that were used before.
        page_size: Tokens per page.
    """
    bins: list[DepthBin] = []
    low, high, deepest = 0, 1, int(ends.max(initial=0))
    while low < deepest:
        pages = np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0)
        found = int(pages[again].sum())
        bins.append(DepthBin(low * page_size, high * page_size, int(pages.sum()), found))
        low, high = high, high * 2
    return tuple(bins)
