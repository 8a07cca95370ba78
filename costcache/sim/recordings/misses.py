"""Why prompt tokens of a recording were not found, token by token."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.sim.traces.recording import Recorded

__all__ = ["Misses", "find_misses"]


@dataclass(frozen=True, slots=True)
class Misses:
    """The prompt tokens of requests of which it is known what the server found; the parts add up.

    Attributes:
        tokens: All of them.
        found: The server found them.
        gone: An earlier request had computed them, and they were no longer cached: evicted, or reset.
        running: A request that had not ended yet had them too.
        cut: They were cached, in a page of which other tokens differ, or are the last token, which is always
            computed.
        other_start: New, in prompts that begin as no earlier one does.
        new: New, after a beginning that was seen before.
    """

    tokens: int
    found: int
    gone: int
    running: int
    cut: int
    other_start: int
    new: int

    @property
    def unlimited(self) -> float:
        """Share that a cache of unlimited size would find."""
        return (self.found + self.gone + self.running) / self.tokens if self.tokens else 0.0


def find_misses(recorded: Recorded, page_size: int | None = None) -> Misses:
    """Attribute the tokens of a recording.

    Args:
        recorded: The requests. Their hashes must be comparable, so with the same salt.
        page_size: Tokens per page of the server; by default as the recording says, else that of its blocks.
    """
    trace = recorded.trace
    size = trace.block_size
    page = page_size or recorded.headers[0].page_size or size
    ends: dict[int, float] = {}  # of the first request that ended with a block
    ids, offsets = trace.ids.tolist(), trace.offsets.tolist()
    outputs = None if trace.output_ids is None else trace.output_ids.tolist()
    output_offsets = None if trace.output_offsets is None else trace.output_offsets.tolist()
    service = None if trace.service_seconds is None else trace.service_seconds.tolist()
    tokens = found = gone = running = cut = other_start = new = 0
    columns = zip(
        trace.timestamps.tolist(), trace.input_tokens.tolist(), recorded.cached.tolist(), strict=True
    )
    for number, (arrived, length, cached) in enumerate(columns):
        whole = length // size
        blocks = ids[offsets[number] : offsets[number] + whole]
        # A block stands for all before it: those seen come first, and those of ended requests before others.
        seen = bisect_left(blocks, True, key=lambda block: block not in ends)
        done = bisect_left(blocks, True, hi=seen, key=lambda block: ends[block] > arrived)
        if cached >= 0:
            usable = (length - 1) // page * page
            had = max(cached, min(done * size, usable))
            ran = max(had, min(seen * size, usable))
            left = max(ran, min(seen * size, length))
            tokens += length
            found += cached
            gone += had - cached
            running += ran - had
            cut += left - ran
            if left:
                new += length - left
            else:
                other_start += length
        took = service[number] if service is not None else 0.0
        end = arrived + (0.0 if math.isnan(took) else took)
        if outputs is not None and output_offsets is not None:
            blocks += outputs[output_offsets[number] : output_offsets[number + 1]]
        for block in blocks:
            if ends.get(block, math.inf) > end:
                ends[block] = end
    return Misses(tokens, found, gone, running, cut, other_start, new)
