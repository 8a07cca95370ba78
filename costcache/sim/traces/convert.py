"""Rewrites block ids so that each names its block together with all blocks before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costcache.errors import TraceError
from costcache.sim.runs import PageRuns, page_runs
from costcache.sim.trace import MOST_BLOCK, Trace

__all__ = ["rounded_up", "with_path_ids"]

Int64 = NDArray[np.int64]


def with_path_ids(trace: Trace, block_size: int | None = None) -> Trace:
    """Identify blocks by their path, numbered from 0 in the order of their first occurrence.

    Two prompts then share an id exactly if they are equal from the start to the end of its block, so a
    simulator that looks up ids one by one gets the same hits as one that follows paths.

    Args:
        trace: The requests.
        block_size: Tokens per id in the result, a multiple of the trace's; its own by default.

    Raises:
        TraceError: If ``block_size`` is no multiple of the trace's, or over
            :data:`~costcache.sim.trace.MOST_BLOCK`.
    """
    size = block_size or trace.block_size
    if not 1 <= size <= MOST_BLOCK or size % trace.block_size:
        raise TraceError(
            f"{trace.name}: block size is {size}; give a multiple of the trace's own, {trace.block_size}, "
            f"up to {MOST_BLOCK:,} tokens"
        )
    blocks = np.diff(trace.offsets)
    ids = trace.ids
    merged = size // trace.block_size
    if merged > 1:
        ids, blocks = _filled_up(ids, blocks, trace.offsets, merged)
    # Partial last blocks count as whole here, so that they have paths too.
    whole = Trace(
        name=trace.name,
        block_size=trace.block_size,
        timestamps=trace.timestamps,
        input_tokens=blocks * trace.block_size,
        output_tokens=trace.output_tokens,
        ids=ids,
        offsets=np.concatenate(([0], np.cumsum(blocks))).astype(np.int64),
    )
    runs = page_runs(whole.page_keys(size))
    return replace(
        trace,
        block_size=size,
        ids=_by_first_use(runs),
        offsets=np.concatenate(([0], np.cumsum(blocks * trace.block_size // size))).astype(np.int64),
        output_ids=None,
        output_offsets=None,
    )


def rounded_up(trace: Trace) -> Trace:
    """Count the partial last block of each prompt as a whole one.

    It is then cached and takes a whole block of the pool, as in simulators that count block ids only. Hit
    rates are shares of blocks.
    """
    return replace(
        trace,
        input_tokens=np.diff(trace.offsets) * trace.block_size,
        output_ids=None,  # outputs start where the prompt really ends
        output_offsets=None,
    )


def _filled_up(ids: Int64, blocks: Int64, offsets: Int64, multiple: int) -> tuple[Int64, Int64]:
    """Pad each prompt with an id that occurs in no prompt up to a multiple; returns ids and counts."""
    names, numbers = np.unique(ids, return_inverse=True)
    filled = -(-blocks // multiple) * multiple
    starts = np.concatenate(([0], np.cumsum(filled)))
    result = np.full(int(starts[-1]), len(names), dtype=np.int64)
    result[np.arange(len(ids)) + np.repeat(starts[:-1] - offsets[:-1], blocks)] = numbers
    return result, filled


def _by_first_use(runs: PageRuns) -> Int64:
    """Number the pages in the order of their first use; the ids of all prompts, concatenated."""
    visited, first = np.unique(runs.visits, return_index=True)
    order = visited[np.argsort(first)]
    numbers = np.zeros(runs.lengths.size, np.int64)  # of the first page of each run
    numbers[order] = np.cumsum(runs.lengths[order]) - runs.lengths[order]
    lengths = runs.lengths[runs.visits]
    before = np.cumsum(lengths) - lengths
    ids = np.repeat(numbers[runs.visits] - before, lengths)
    ids += np.arange(ids.size)
    return ids
