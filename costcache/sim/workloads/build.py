"""Builds a trace of conversations: block ids that stand for prefixes, requests sorted by time."""

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
    """Allocates block ids, each once."""

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
    """Ids of the context's whole blocks; only the first ``input_tokens // 16`` count, as it may grow."""
    tail: int | None
    """Id of the partial last block, which no other prompt shares; None if there is none."""
    tenant: int = -1
    """Number of the tenant that sent it; -1 in workloads without tenants."""


class Context:
    """The tokens of one conversation so far, as block ids without text."""

    __slots__ = ("_blocks", "_path", "tenant", "tokens")

    def __init__(self, blocks: Blocks, tokens: int = 0, tenant: int = -1) -> None:
        self.tokens = 0
        self.tenant = tenant
        self._blocks = blocks
        self._path: array[int] = array("q")
        self.extend(tokens)

    def extend(self, tokens: int) -> None:
        """Append tokens that follow this context nowhere else."""
        self.tokens += tokens
        self._path.extend(self._blocks.take(self.tokens // BLOCK_SIZE - len(self._path)))

    def fork(self) -> Context:
        """A copy of the conversation so far; the two diverge from here on."""
        twin = Context(self._blocks, tenant=self.tenant)
        twin.tokens = self.tokens
        twin._path = self._path[:]
        return twin

    def request(self, seconds: float, output_tokens: int) -> Request:
        """A request whose prompt is the conversation so far."""
        tail = self._blocks.take(1)[0] if self.tokens % BLOCK_SIZE else None
        return Request(seconds, self.tokens, output_tokens, self._path, tail, self.tenant)


class Prompts:
    """A set of shared prompts, with lengths drawn once; of one tenant each, if ``owned``."""

    def __init__(
        self, settings: PromptSet, blocks: Blocks, rng: np.random.Generator, *, owned: bool = False
    ) -> None:
        self._contexts = [
            Context(blocks, settings.tokens.tokens(rng), number if owned else -1)
            for number in range(settings.count)
        ]
        weights = [rank**-settings.zipf for rank in range(1, settings.count + 1)]
        self._cumulative = list(accumulate(weights))
        self._rng = rng

    def begin(self) -> Context:
        """Start a conversation with one of the prompts."""
        at = self._rng.random() * self._cumulative[-1]
        # The product may round up to the sum itself.
        which = min(bisect_right(self._cumulative, at), len(self._contexts) - 1)
        return self._contexts[which].fork()


def arrivals(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Endless arrival times, in seconds, of a Poisson process with ``rate`` arrivals per second."""
    seconds = 0.0
    while True:
        seconds += float(rng.standard_exponential()) / rate
        yield seconds


def build_trace(
    name: str, sessions: Iterable[tuple[float, Iterable[Request]]], blocks: Blocks, requests: int
) -> Trace:
    """Build a trace of the first ``requests`` requests by time.

    Args:
        name: The trace's name.
        sessions: Start in seconds and requests of each session, in order of the starts; no request is before
            the start of its session.
        blocks: The source of the sessions' ids.
        requests: Number of requests; fewer if the sessions run out.
    """
    taken: list[Request] = []
    waiting: list[tuple[float, int, Request]] = []
    serial = 0  # requests of equal times keep their order
    for start, session in sessions:
        # No later session has a request before this start.
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
    tenants = np.array([request.tenant for request in taken], dtype=np.int64)
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
        tenants=tenants if (tenants >= 0).any() else None,
        tenant_names=tuple(f"tenant-{number}" for number in range(max(tenants.tolist(), default=-1) + 1)),
    )


def _numbered(
    requests: list[Request], offsets: np.ndarray[tuple[int], np.dtype[np.int64]], given: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All block ids, renumbered from 0 in the order of their first occurrence."""
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
