"""From conversations to a trace: block ids that stand for prefixes, requests in time order."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from costcache.sim.trace import Trace
from costcache.sim.workloads.settings import PromptSet

__all__ = ["BLOCK_SIZE", "Blocks", "Context", "Prompts", "Request", "arrivals", "build_trace"]

BLOCK_SIZE = 16
"""Tokens per block id of every generated workload."""


class Blocks:
    """Gives out block ids, each once."""

    def __init__(self) -> None:
        self.given = 0

    def take(self, count: int) -> range:
        """The next ``count`` ids."""
        first = self.given
        self.given += count
        return range(first, self.given)


class Request(NamedTuple):
    """One request of a session."""

    seconds: float
    input_tokens: int
    output_tokens: int
    path: array[int]
    """Ids of the context's whole blocks; it may grow on, the first ``input_tokens // 16`` count."""
    tail: int | None
    """Id of the partial last block: nobody else's, since what follows it is not the same."""


class Context:
    """The tokens of one conversation so far. Only their blocks are known, not their text."""

    __slots__ = ("_blocks", "_path", "tokens")

    def __init__(self, blocks: Blocks, tokens: int = 0) -> None:
        self.tokens = 0
        self._blocks = blocks
        self._path: array[int] = array("q")
        self.extend(tokens)

    def extend(self, tokens: int) -> None:
        """Append tokens that occur nowhere else in this place."""
        self.tokens += tokens
        self._path.extend(self._blocks.take(self.tokens // BLOCK_SIZE - len(self._path)))

    def fork(self) -> Context:
        """A conversation with the same tokens so far; what is appended to either is its own."""
        twin = Context(self._blocks)
        twin.tokens = self.tokens
        twin._path = self._path[:]
        return twin

    def request(self, seconds: float, output_tokens: int) -> Request:
        """Ask for an answer to the tokens so far."""
        tail = self._blocks.take(1)[0] if self.tokens % BLOCK_SIZE else None
        return Request(seconds, self.tokens, output_tokens, self._path, tail)


class Prompts:
    """A set of shared prompts, their lengths drawn once."""

    def __init__(self, settings: PromptSet, blocks: Blocks, rng: np.random.Generator) -> None:
        self._contexts = [Context(blocks, settings.tokens.tokens(rng)) for _ in range(settings.count)]
        weights = [rank**-settings.zipf for rank in range(1, settings.count + 1)]
        self._cumulative = list(accumulate(weights))
        self._rng = rng

    def begin(self) -> Context:
        """A new conversation that begins with one of the prompts."""
        at = self._rng.random() * self._cumulative[-1]
        # The product may round up to the sum itself.
        which = min(bisect_right(self._cumulative, at), len(self._contexts) - 1)
        return self._contexts[which].fork()


def arrivals(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Arrival times in seconds of a Poisson process of ``rate`` a second, without end."""
    seconds = 0.0
    while True:
        seconds += float(rng.standard_exponential()) / rate
        yield seconds


def build_trace(
    name: str, sessions: Iterable[tuple[float, Iterable[Request]]], blocks: Blocks, requests: int
) -> Trace:
    """The first ``requests`` requests by time, of sessions given in order of their start.

    Args:
        name: The trace's name.
        sessions: Start in seconds and requests of each session, none before its start.
        blocks: Where the sessions took their ids from.
        requests: How many requests to take; fewer if the sessions end before.
    """
    taken: list[Request] = []
    waiting: list[tuple[float, int, Request]] = []
    serial = 0  # Equal times keep the order in which they were made.
    for start, session in sessions:
        # Nothing that is still to come lies before this start.
        while waiting and waiting[0][0] <= start and len(taken) < requests:
            taken.append(heapq.heappop(waiting)[2])
        if len(taken) == requests:
            break
        for request in session:
            heapq.heappush(waiting, (request.seconds, serial, request))
            serial += 1
    while waiting and len(taken) < requests:
        taken.append(heapq.heappop(waiting)[2])
    lengths = [-(-request.input_tokens // BLOCK_SIZE) for request in taken]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Trace(
        name=name,
        block_size=BLOCK_SIZE,
        # Whole milliseconds, as in the trace file.
        timestamps=np.array([round(r.seconds * 1000.0) / 1000.0 for r in taken], dtype=np.float64),
        input_tokens=np.array([r.input_tokens for r in taken], dtype=np.int64),
        output_tokens=np.array([r.output_tokens for r in taken], dtype=np.int64),
        ids=_numbered(taken, offsets, blocks.given),
        offsets=offsets,
    )


def _numbered(
    requests: list[Request], offsets: np.ndarray[tuple[int], np.dtype[np.int64]], given: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All block ids, renumbered from 0 in the order in which they first occur."""
    numbers = np.full(given, -1, dtype=np.int64)
    ids = np.empty(int(offsets[-1]), dtype=np.int64)
    used = 0
    for request, start, stop in zip(requests, offsets[:-1], offsets[1:], strict=True):
        taken = np.empty(stop - start, dtype=np.int64)
        whole = request.input_tokens // BLOCK_SIZE
        taken[:whole] = np.frombuffer(request.path, dtype=np.int64, count=whole) if whole else ()
        if request.tail is not None:
            taken[whole] = request.tail
        numbered = numbers[taken]
        new = np.flatnonzero(numbered < 0)
        numbered[new] = np.arange(used, used + len(new))
        numbers[taken[new]] = numbered[new]
        used += len(new)
        ids[start:stop] = numbered
    return ids
