"""Block ids that mean the same to every reader: each names its block with all blocks before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costcache.errors import TraceError
from costcache.sim.paths import page_paths
from costcache.sim.trace import MOST_BLOCK, Trace

__all__ = ["rounded_up", "with_path_ids"]

Int64 = NDArray[np.int64]


def with_path_ids(trace: Trace, block_size: int | None = None) -> Trace:
    """The trace with ids by path, numbered from 0 in the order in which they first occur.

    Two prompts have an id in common exactly where they agree from the start up to the end of its
    block, so a reader that looks ids up one by one finds what one finds that goes by path.

    Args:
        trace: The requests.
        block_size: Tokens per id in the result, a multiple of the trace's; its own by default.

    Raises:
        TraceError: ``block_size`` is no multiple of the trace's, or over
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
    # Partial last blocks count as whole ones here: their ids have paths too.
    whole = Trace(
        name=trace.name,
        block_size=trace.block_size,
        timestamps=trace.timestamps,
        input_tokens=blocks * trace.block_size,
        output_tokens=trace.output_tokens,
        ids=ids,
        offsets=np.concatenate(([0], np.cumsum(blocks))).astype(np.int64),
    )
    paths = page_paths(whole.page_keys(size))
    return Trace(
        name=trace.name,
        block_size=size,
        timestamps=trace.timestamps,
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        ids=_by_first_use(paths.paths, paths.distinct),
        offsets=paths.offsets,
    )


def rounded_up(trace: Trace) -> Trace:
    """The trace with the partial last block of each prompt counted as a whole one.

    So it is cached, and takes a whole block of the pool, as in simulators that go by block ids
    alone. Hit rates are then shares of blocks.
    """
    return replace(
        trace,
        input_tokens=np.diff(trace.offsets) * trace.block_size,
        output_ids=None,  # they go on where the prompt really ends
        output_offsets=None,
    )


def _filled_up(ids: Int64, blocks: Int64, offsets: Int64, multiple: int) -> tuple[Int64, Int64]:
    """Ids of each prompt with one that nobody else has behind, up to a multiple; and their counts."""
    names, numbers = np.unique(ids, return_inverse=True)
    filled = -(-blocks // multiple) * multiple
    starts = np.concatenate(([0], np.cumsum(filled)))
    result = np.full(int(starts[-1]), len(names), dtype=np.int64)
    result[np.arange(len(ids)) + np.repeat(starts[:-1] - offsets[:-1], blocks)] = numbers
    return result, filled


def _by_first_use(numbers: Int64, distinct: int) -> Int64:
    first = np.empty(distinct, dtype=np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]  # of equal indices the last is kept
    renumbered = np.empty(distinct, dtype=np.int64)
    renumbered[np.argsort(first)] = np.arange(distinct)
    return renumbered[numbers]
