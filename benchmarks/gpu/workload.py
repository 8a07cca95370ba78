"""Requests for an Engine, token by token: a recorded or generated trace, made smaller and faster.

A trace says which blocks are the same, not what is in them. Tokens are derived from each block's id, so that
equal blocks are equal tokens in every run. ``shrink`` divides all lengths, including those of blocks:
requests share as many blocks as before, and a prefill takes a fraction of the time. (Truncating long prompts,
or replaying a few requests at full length, would change what is reused.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costcache.sim.load import spread_ties
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.workloads import WORKLOADS, generate

__all__ = ["Workload", "build", "tokens_of"]

SPECIAL = 10  # the first ids of a vocabulary are not used: some of them end a text

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send, and their rate.

    Attributes:
        source: Name of a generated workload, or path of a trace.
        requests: Number of requests, from the start of the trace.
        shrink: Divisor of all prompt lengths; it must divide the trace's block size.
        outputs: Factor for the number of generated tokens, which is at least one.
        rate: Requests per second, on average; the trace's own pattern of arrivals is kept.
        vocabulary: Upper bound of token ids, exclusive; they start at 10.
        seed: Seed of the tokens.
    """

    source: str
    requests: int
    shrink: int
    outputs: float
    rate: float
    vocabulary: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Name for tables."""
        return self.source if self.source in WORKLOADS else Path(self.source).name.split(".")[0]

    def as_dict(self) -> dict[str, Any]:
        """Fields for a line of JSON, with the trace's file name in place of its path."""
        return {**asdict(self), "source": self.source if self.source in WORKLOADS else Path(self.source).name}


def build(workload: Workload) -> Trace:
    """Build the requests as a trace in blocks of one token, whose ids are the tokens themselves.

    Generated tokens get ids too, which no prompt has: a server caches them as well.

    Raises:
        ValueError: If the settings do not fit the trace.
    """
    source = generate(workload.source) if workload.source in WORKLOADS else load_trace(workload.source)
    if workload.requests > len(source):
        raise ValueError(
            f"--requests is {workload.requests}, but {workload.name} has {len(source)}: give at most that"
        )
    block, left = divmod(source.block_size, workload.shrink)
    if left or not block:
        raise ValueError(
            f"--shrink is {workload.shrink}: it must divide {workload.name}'s blocks of {source.block_size}"
        )
    trace = source.take(np.arange(workload.requests))
    lengths = -(-trace.input_tokens // workload.shrink)
    outputs = np.maximum(1, np.rint(trace.output_tokens * workload.outputs)).astype(np.int64)
    times = trace.timestamps - trace.timestamps[0]
    speed = workload.rate * float(times[-1]) / (workload.requests - 1)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    ids = np.empty(int(offsets[-1]), np.int64)
    for request, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        blocks = trace.ids[trace.offsets[request] : trace.offsets[request + 1]]
        ids[start:stop] = tokens_of(blocks, block, workload.vocabulary, workload.seed)[: stop - start]
    ends = np.concatenate(([0], np.cumsum(outputs))).astype(np.int64)
    return Trace(
        name=workload.name,
        block_size=1,
        timestamps=spread_ties(times) / speed,
        input_tokens=lengths,
        output_tokens=outputs,
        ids=ids,
        offsets=offsets,
        output_ids=workload.vocabulary + np.arange(int(ends[-1]), dtype=np.int64),
        output_offsets=ends,
    )


def tokens_of(blocks: Int64, size: int, vocabulary: int, seed: int) -> Int64:
    """Make ``size`` tokens per block id, int64 of shape (blocks * size,): a hash of id, position and seed.

    The hash is splitmix64's finalizer (Steele, Lea, Flood, OOPSLA 2014).
    """
    within = np.arange(size, dtype=np.uint64)
    positions = (blocks.astype(np.uint64)[:, None] * np.uint64(size) + within).ravel()
    state: NDArray[np.uint64]
    with np.errstate(over="ignore"):  # it counts modulo 2**64
        state = (positions + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    tokens: Int64 = (state % np.uint64(vocabulary - SPECIAL)).astype(np.int64) + SPECIAL
    return tokens
