"""Serving replay: requests wait, hold slots while they run, and overlap.

One server with one prefill at a time and many decodes at once. A request waits for its turn (first
come, first served), for a free place among the running ones, and for slots; it then matches all but
its last prompt token (a server always computes that one), locks what it matched, and holds
slots for the rest of its prompt and for its output until it ends. Its prompt is cached when its prefill
ends. Its output is cached when it ends, where the trace names the generated tokens: all but the last one,
which was never computed on.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from costcache.errors import SettingsError
from costcache.records import RequestRecord
from costcache.sim.load import Load, load_kind
from costcache.sim.loop import PER_REPORT, no_collector
from costcache.sim.replay import outcome_of
from costcache.sim.requests import RequestInfos
from costcache.sim.settings import ServingSettings

if TYPE_CHECKING:
    from costcache.radix.node import Node
    from costcache.radix.store import PrefixStore
    from costcache.sim.results import Outcome
    from costcache.sim.trace import PageKeys, Trace
    from costcache.sim.ttft import PrefillModel

__all__ = ["ServingSettings", "serve"]


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
        self.load = Load(
            trace,
            load_kind(settings.load, trace),
            clients=settings.concurrency,
            rate=settings.rate,
            spread=settings.spread_bursts,
        )
        left = trace.with_outputs(computed=True) if settings.outputs else None
        self.left = None if left is None else left.page_keys(keys.page_size)
        self.service: list[float] = []
        if settings.service == "recorded":
            if trace.service_seconds is None:
                raise SettingsError(
                    f"service is 'recorded', and {trace.name} does not say how long requests took: leave it "
                    "at 'modelled'"
                )
            self.service = np.nan_to_num(trace.service_seconds, nan=-1.0).tolist()
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
        running, limit = self.running, self.settings.concurrency
        told, count, done = 0, len(self.inputs), 0
        now = 0.0
        while True:
            if not waiting:
                event = self.next_event()
                if event is None:
                    break
                now = max(now, event)
            now = max(now, self.free_at)
            self.until(now, waiting)
            if not waiting:
                continue
            if len(running) < limit and self.start(waiting[0], now, alone=not running):
                waiting.popleft()
                done += 1
                if self.progress is not None and done - told >= PER_REPORT:
                    self.progress(done - told)
                    told = done
            else:
                now = max(now, running[0].ends)  # a place, or slots, come free then
        if self.progress is not None:
            self.progress(count - told)
        seconds = time.perf_counter() - started
        return outcome_of(self.store, self.matched, seconds, self.deciding, self.ttft)

    def next_event(self) -> float | None:
        """When the next request comes or ends; None where nothing is left to happen."""
        comes = self.load.next_time()
        ends = self.running[0].ends if self.running else None
        if comes is None or ends is None:
            return ends if comes is None else comes
        return min(comes, ends)

    def until(self, now: float, waiting: deque[int]) -> None:
        """All that happens up to ``now``, in order: an end may bring a new request."""
        running, load = self.running, self.load
        while True:
            comes = load.next_time()
            if running and running[0].ends <= now and (comes is None or running[0].ends <= comes):
                self.finish(heapq.heappop(running))
            elif comes is not None and comes <= now:
                waiting.append(load.take())
            else:
                return

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
            request = self.head = RequestRecord(clock.begin(), clock.now, clock.in_seconds)
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
        self.ttft[index] = self.free_at - self.load.arrivals[index]
        self.matched[index] = found
        node, held = self.cache_prompt(index, key, node, held, request)
        self.restore()
        ends = self.free_at + max(0, output - 1) * self.settings.decode_seconds
        if self.service and self.service[index] >= 0.0:
            ends = max(self.free_at, now + self.service[index])
        heapq.heappush(self.running, _Running(ends, index, node, held, request))
        return True

    def cache_prompt(
        self, index: int, key: bytes, node: Node, held: int, request: RequestRecord
    ) -> tuple[Node, int]:
        """Move the prompt's whole pages from the request to the tree; returns the node to hold locked."""
        tree = self.store.tree
        # The page of the last token may be cached already, though the request had to compute it.
        leaf, held = self.extend(index, key, self.whole[index], held, request)
        if leaf is not node:
            tree.lock(leaf)
            tree.unlock(node)
        return leaf, held

    def extend(
        self, index: int, key: bytes, tokens: int, held: int, request: RequestRecord
    ) -> tuple[Node, int]:
        """Move what is not cached yet of ``tokens`` tokens from a request to the tree, as far as it holds it.

        Returns:
            The node at the end, and the slots that the request still holds.
        """
        store, tree = self.store, self.store.tree
        page = tree.page_size
        leaf = tree.match(tree.root(()), key, request)
        cached = leaf.depth + leaf.tokens
        added = min(tokens - cached, held // page * page)
        if added > 0:
            store.held -= added
            leaf = tree.append(leaf, tree.part(key, cached, added), None, request)
        self.prefer(leaf, index)
        return leaf, held - max(0, added)

    def finish(self, run: _Running) -> None:
        """End a request: cache its output, free what it held, unlock its prefix."""
        store = self.store
        clock = store.tree.clock
        clock.advance(max(run.ends, clock.now))
        held = run.held if self.left is None else self.cache_output(self.left, run)
        store.held -= held
        store.tree.unlock(run.node)
        if store.guard.finish is not None:
            store.guard.finish(run.request, self.infos.of(run.number, self.matched[run.number]))
        self.restore()
        self.load.ended(run.number, run.ends)

    def cache_output(self, left: PageKeys, run: _Running) -> int:
        """Move the output's whole pages from the request to the tree; returns the slots it still holds."""
        tokens = int(left.tokens[run.number])
        if tokens <= self.whole[run.number]:
            return run.held  # the output fills no page
        # A partial block of the prompt has another name once it is full: its pages are cached twice.
        return self.extend(run.number, bytes(left[run.number]), tokens, run.held, run.request)[1]

    def prefer(self, node: Node, index: int) -> None:
        """Give a request's nodes its priority."""
        if self.priorities is not None and self.priorities[index]:
            self.store.tree.raise_priority(node, self.priorities[index])

    def restore(self) -> None:
        """Keep the free target, as far as locks allow."""
        missing = min(self.reserve - self.store.free, self.store.tree.evictable) if self.reserve else 0
        if missing > 0:
            before = time.perf_counter()
            self.store.evict(missing, watermark=False)
            self.deciding += time.perf_counter() - before
