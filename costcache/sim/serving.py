"""Serving replay: requests wait, hold slots while they run, and overlap.

One server with one prefill at a time and many decodes at once. A request waits for its turn (first
come, first served), for a free place among the running ones, and for slots; it then matches all but
its last prompt token (a server always computes that one), locks what it matched, and holds
slots for the rest of its prompt and for its output until it ends. Its prompt is cached when its prefill
ends. Its output is not, since traces do not name output tokens.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from costcache.records import RequestRecord
from costcache.sim.replay import no_collector, outcome_of
from costcache.sim.requests import RequestInfos

if TYPE_CHECKING:
    from costcache.radix.node import Node
    from costcache.radix.store import PrefixStore
    from costcache.sim.results import Outcome
    from costcache.sim.trace import PageKeys, Trace
    from costcache.sim.ttft import PrefillModel

__all__ = ["ServingSettings", "serve"]

_PER_REPORT = 512


class ServingSettings(BaseModel):
    """How the server of a serving replay runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: int = Field(64, ge=1, description="Requests that run at once, at most.")
    decode_seconds: float = Field(
        0.025, ge=0, allow_inf_nan=False, description="Seconds per output token of a running request."
    )
    spread_bursts: bool = Field(
        True,
        description="Spread requests of one timestamp evenly up to the next: traces round their clocks.",
    )
    rate: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Speed of arrivals against the trace: 0.5 is half as fast.",
    )


class _Running(NamedTuple):
    """A running request; the one that ends first comes first."""

    ends: float
    number: int
    node: Node
    held: int
    request: RequestRecord


def serve(
    trace: Trace,
    keys: PageKeys,
    store: PrefixStore,
    prefill: PrefillModel,
    settings: ServingSettings,
    *,
    always_free: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay a trace once on a server, through an empty store.

    Args:
        trace: The requests, in order of time.
        keys: Their pages, at the store's page size.
        store: The tree and its policy.
        prefill: Seconds of a prefill.
        settings: The server.
        always_free: Restore the free target when a request was admitted and when one ends, not only when
            an eviction has a shortfall.
        progress: Called now and then with the number of requests done since the last call.
    """
    with no_collector():
        return _Server(trace, keys, store, prefill, settings, always_free, progress).run()


class _Server:
    def __init__(
        self,
        trace: Trace,
        keys: PageKeys,
        store: PrefixStore,
        prefill: PrefillModel,
        settings: ServingSettings,
        always_free: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.keys, self.store, self.prefill, self.settings = keys, store, prefill, settings
        times = _spread(trace.timestamps) if settings.spread_bursts else trace.timestamps
        self.arrivals: list[float] = (times / settings.rate).tolist()
        self.inputs: list[int] = trace.input_tokens.tolist()
        self.outputs: list[int] = trace.output_tokens.tolist()
        self.infos = RequestInfos(trace)
        self.priorities: list[int] | None = None if trace.priorities is None else trace.priorities.tolist()
        self.whole: list[int] = keys.tokens.tolist()
        self.reserve = store.pipeline.reserve() if always_free else 0
        self.watermark = not always_free
        self.progress = progress
        self.matched = [0] * len(trace)
        self.ttft = [0.0] * len(trace)
        self.running: list[_Running] = []
        self.free_at = 0.0  # when the prefill under way ends
        self.deciding = 0.0
        self.head: RequestRecord | None = None  # of the first that waits, once it was looked at

    def run(self) -> Outcome:
        started = time.perf_counter()
        waiting: deque[int] = deque()
        arrivals, running, limit = self.arrivals, self.running, self.settings.concurrency
        upcoming, done, count = 0, 0, len(arrivals)
        now = 0.0
        while upcoming < count or waiting:
            if not waiting:
                now = max(now, arrivals[upcoming])
            now = max(now, self.free_at)
            while upcoming < count and arrivals[upcoming] <= now:
                waiting.append(upcoming)
                upcoming += 1
            while running and running[0].ends <= now:
                self.finish(heapq.heappop(running))
            if len(running) < limit and self.start(waiting[0], now, alone=not running):
                waiting.popleft()
                if self.progress is not None and (upcoming - len(waiting)) - done >= _PER_REPORT:
                    self.progress(upcoming - len(waiting) - done)
                    done = upcoming - len(waiting)
            else:
                now = max(now, running[0].ends)  # a place, or slots, come free then
        while running:
            self.finish(heapq.heappop(running))
        if self.progress is not None:
            self.progress(count - done)
        seconds = time.perf_counter() - started
        return outcome_of(self.store, self.matched, seconds, self.deciding, self.ttft)

    def start(self, index: int, now: float, *, alone: bool) -> bool:
        """Admit the request at the head of the queue and run its prefill; False when it must wait."""
        store = self.store
        tree, page = store.tree, store.tree.page_size
        tokens, output = self.inputs[index], self.outputs[index]
        key = bytes(self.keys[index])
        usable = max(0, tokens - 1) // page * tree.page_bytes  # all but the last token, whole pages
        clock = tree.clock
        clock.advance(max(now, clock.now))
        request = self.head
        if request is None:
            request = self.head = RequestRecord(clock.begin(), clock.now)
        # One that has to wait matches again: its prefix is kept recent, and its use counts once.
        node = tree.match(tree.root(()), key[:usable], request)
        found = request.matched = node.depth + node.tokens
        tree.lock(node)
        need = -(-(tokens + output) // page) * page - found
        if need > store.free + tree.evictable and not alone:
            tree.unlock(node)
            return False
        self.head = None
        if need > store.free:
            before = time.perf_counter()
            store.pipeline.evict(need - store.free, watermark=self.watermark)
            self.deciding += time.perf_counter() - before
        held = min(need, store.free)  # less only for a request that is larger than the pool
        store.oversized += held < need
        store.held += held
        took = self.prefill.one(max(1, tokens - found) if tokens else 0, found)
        self.free_at = now + took
        self.ttft[index] = self.free_at - self.arrivals[index]
        self.matched[index] = found
        node, held = self.cache_prompt(index, key, node, held, request)
        self.restore()
        ends = self.free_at + max(0, output - 1) * self.settings.decode_seconds
        heapq.heappush(self.running, _Running(ends, index, node, held, request))
        return True

    def cache_prompt(
        self, index: int, key: bytes, node: Node, held: int, request: RequestRecord
    ) -> tuple[Node, int]:
        """Move the prompt's whole pages from the request to the tree; returns the node to hold locked."""
        store, tree = self.store, self.store.tree
        page = tree.page_size
        # The page of the last token may be cached already, though the request had to compute it.
        leaf = tree.match(tree.root(()), key, request)
        cached = leaf.depth + leaf.tokens
        added = min(self.whole[index] - cached, held // page * page)
        if added > 0:
            first = cached // page * tree.page_bytes
            store.held -= added
            leaf = tree.append(leaf, key[first : first + added // page * tree.page_bytes], None, request)
        if self.priorities is not None and self.priorities[index]:
            tree.raise_priority(leaf, self.priorities[index])
        if leaf is not node:
            tree.lock(leaf)
            tree.unlock(node)
        return leaf, held - max(0, added)

    def finish(self, run: _Running) -> None:
        """End a request: free what it held, unlock its prefix."""
        store = self.store
        clock = store.tree.clock
        clock.advance(max(run.ends, clock.now))
        store.held -= run.held
        store.tree.unlock(run.node)
        if store.guard.finish is not None:
            store.guard.finish(run.request, self.infos.of(run.number, self.matched[run.number]))
        self.restore()

    def restore(self) -> None:
        """Keep the free target, as far as locks allow."""
        missing = min(self.reserve - self.store.free, self.store.tree.evictable) if self.reserve else 0
        if missing > 0:
            before = time.perf_counter()
            self.store.evict(missing, watermark=False)
            self.deciding += time.perf_counter() - before


def _spread(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Requests of one timestamp, evenly up to the next; the last ones over the gap before them."""
    distinct, first, counts = np.unique(times, return_index=True, return_counts=True)
    if distinct.size < 2:
        return times
    gaps = np.diff(distinct, append=2 * distinct[-1] - distinct[-2])
    place = np.arange(times.size) - np.repeat(first, counts)
    return times + place * np.repeat(gaps / counts, counts)
