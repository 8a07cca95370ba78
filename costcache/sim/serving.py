"""Serving replay: requests queue, overlap, and reserve slots while they run.

One server with one prefill at a time and many concurrent decodes. A request waits in the queue (first
come, first served) until the prefill before it has ended, fewer than ``concurrency`` requests run, and there
are slots for it. It matches all but its last prompt token (which a server always computes), locks what it
matched, and reserves slots for the rest of its prompt and for its output until it ends, in the steps of
:mod:`costcache.sim.steps`. Its prompt is cached when its prefill ends, or chunk by chunk. Its output is
cached when it ends, if the trace names the generated tokens: all but the last one, whose KV is never
computed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from costcache.errors import SettingsError
from costcache.sim.load import load_of
from costcache.sim.loop import no_collector
from costcache.sim.queueing import serve_queue
from costcache.sim.replay import outcome_of
from costcache.sim.requests import RequestInfos
from costcache.sim.settings import ServingSettings
from costcache.sim.steps import steps_of

if TYPE_CHECKING:
    from costcache.radix.node import Node
    from costcache.radix.tree import RadixTree
    from costcache.records import RequestRecord
    from costcache.sim.requests import Known
    from costcache.sim.results import Outcome
    from costcache.sim.trace import PageKeys, Trace
    from costcache.sim.ttft import PrefillModel

__all__ = ["Running", "Server", "ServingSettings", "serve"]


class Running(NamedTuple):
    """A running request; the earliest end sorts first.

    Attributes:
        ends: Seconds at which it ends.
        number: Its number in the trace, from 0.
        node: The locked end of its prefix.
        reserved: Slots that it owns outside the tree.
        request: Its record.
    """

    ends: float
    number: int
    node: Node
    reserved: int
    request: RequestRecord


def serve(
    trace: Trace,
    keys: PageKeys,
    tree: RadixTree,
    prefill: PrefillModel,
    settings: ServingSettings,
    *,
    always_free: bool = False,
    known: Known = "server",
    progress: Callable[[int], None] | None = None,
    server: type[Server] | None = None,
) -> Outcome:
    """Replay a trace once on a server, through an empty tree.

    Args:
        trace: The requests, in order of time.
        keys: Their pages, at the tree's page size.
        tree: The tree.
        prefill: Seconds of a prefill.
        settings: The server.
        always_free: Restore the free target whenever a request is admitted or ends, not only when an
            eviction has a shortfall.
        known: What the policy is told of requests; see :class:`~costcache.sim.requests.RequestInfos`.
        progress: Called now and then with the number of requests done since the last call.
        server: Kind of server; one with one pool of KV by default.

    Raises:
        SettingsError: If the trace lacks the fields that ``settings`` needs.
    """
    with no_collector():
        return (server or Server)(trace, keys, tree, prefill, settings, always_free, progress, known).run()


class Server:
    """A server with a queue; one pool of KV."""

    def __init__(
        self,
        trace: Trace,
        keys: PageKeys,
        tree: RadixTree,
        prefill: PrefillModel,
        settings: ServingSettings,
        always_free: bool,
        progress: Callable[[int], None] | None,
        known: Known = "server",
    ) -> None:
        self.keys, self.tree, self.pool = keys, tree, tree.pool
        self.prefill, self.settings = prefill, settings
        self.load = load_of(settings, trace)
        after = trace.with_outputs(computed=True) if settings.outputs else None
        self.keys_after = None if after is None else after.page_keys(keys.page_size)  # outputs included
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
        self.infos = RequestInfos(trace, known)
        self.priorities: list[int] | None = None if trace.priorities is None else trace.priorities.tolist()
        self.whole: list[int] = keys.tokens.tolist()
        self.steps = steps_of(settings, trace, tree.page_size)
        self.reserve = tree.pool.reserve() if always_free else 0
        self.watermark = not always_free
        self.progress = progress
        self.matched = [0] * len(trace)
        self.ttft = [0.0] * len(trace)
        self.running: list[Running] = []
        self.free_at = 0.0  # end of the current prefill
        self.deciding = 0.0
        self.head: RequestRecord | None = None  # of the head of the queue, once it was tried
        self.find: Callable[[Node, bytes, RequestRecord], Node] = tree.match
        clock = settings.clock
        self.in_seconds = clock == "seconds" or (clock == "auto" and trace.server is None)
        self.begin()

    def begin(self) -> None:
        """Prepare counts that only some servers keep."""

    def run(self) -> Outcome:
        """Replay the trace; returns the outcome."""
        started = time.perf_counter()
        serve_queue(
            self.load, self.running, self.settings.concurrency, self.start, self.finish, self.progress
        )
        seconds = time.perf_counter() - started
        return outcome_of(self.tree, self.matched, seconds, self.deciding, self.ttft)

    def start(self, index: int, now: float) -> float | None:
        """Admit the request at the head of the queue and run its prefill.

        Returns:
            When the prefill ends; None if the request has to wait.
        """
        tree, pool = self.tree, self.pool
        page = tree.page_size
        key = bytes(self.keys[index])
        # Whole pages without the last token, which is always computed.
        usable = max(0, self.inputs[index] - 1) // page * tree.page_bytes
        self.tell(now)
        request = self.head
        if request is None:
            askers = self.infos.askers
            request = self.head = pool.begin(None if askers is None else askers[index])
        # A waiting request matches again: its prefix stays recent, and its use counts once.
        node = self.find(tree.root(()), key[:usable], request)
        if not self.run_prompt(index, now, node, request, alone=not self.running):
            return None
        self.head = None
        self.restore()
        return self.free_at

    def run_prompt(self, index: int, now: float, node: Node, request: RequestRecord, *, alone: bool) -> bool:
        """Admit a request that matched up to ``node``, and cache its prompt; False if it has to wait."""
        pool = self.pool
        found = request.matched = node.depth + node.tokens
        prompt, output = self.inputs[index], self.outputs[index]
        pool.pin(node)
        if self.steps.most(prompt, output) - found > pool.free + pool.evictable and not alone:
            pool.unpin(node)
            return False
        self.prefilled(index, now, found)
        computed, owned, reserved, oversized = -1, found, 0, False
        for step in self.steps.of(found, prompt, output):
            if step.free > pool.free:
                before = time.perf_counter()
                pool.evict(step.free - pool.free, watermark=self.watermark)
                self.deciding += time.perf_counter() - before
            added = min(step.owned - owned, pool.free)  # less only for a request larger than the pool
            oversized |= added < step.owned - owned
            pool.reserved += added
            reserved += added
            owned = step.owned
            if step.computed > computed:
                computed = step.computed
                node, reserved = self.cache_prompt(index, computed, node, reserved, request)
        pool.counters.oversized += oversized
        self.admitted(index, now, node, reserved, request)
        return True

    def prefilled(self, index: int, now: float, found: int) -> None:
        """Run a prefill, of all but the ``found`` tokens."""
        tokens = self.inputs[index]
        took = self.prefill.one(max(1, tokens - found) if tokens else 0, found)
        self.free_at = now + took
        self.ttft[index] = self.free_at - self.load.arrivals[index]
        self.matched[index] = found

    def admitted(self, index: int, now: float, node: Node, reserved: int, request: RequestRecord) -> None:
        """Let a request run until it ends."""
        ends = self.free_at + max(0, self.outputs[index] - 1) * self.settings.decode_seconds
        if self.service and self.service[index] >= 0.0:
            ends = max(self.free_at, now + self.service[index])
        heapq.heappush(self.running, Running(ends, index, node, reserved, request))

    def cache_prompt(
        self, index: int, computed: int, node: Node, reserved: int, request: RequestRecord
    ) -> tuple[Node, int]:
        """Move the whole pages of what is ``computed`` of the prompt from the request to the tree.

        Returns:
            The node to keep locked, and the slots that the request still owns.
        """
        tree, tokens = self.tree, self.whole[index]
        if computed < self.inputs[index]:
            tokens = computed // tree.page_size * tree.page_size
        key = bytes(tree.part(bytes(self.keys[index]), 0, tokens))
        # The page of the last token may be cached already, though the request had to compute it.
        leaf, left = self.extend(index, key, tokens, reserved, request)
        if self.steps.frees_copies:
            copies = min(leaf.depth + leaf.tokens - node.depth - node.tokens - (reserved - left), left)
            self.pool.reserved -= copies
            left -= copies
        if leaf is not node:
            self.pool.pin(leaf)
            self.pool.unpin(node)
        return leaf, left

    def extend(
        self, index: int, key: bytes, tokens: int, reserved: int, request: RequestRecord
    ) -> tuple[Node, int]:
        """Move the uncached part of ``tokens`` tokens from a request to the tree, up to the slots it owns.

        Returns:
            The node at the end, and the slots that the request still owns.
        """
        tree = self.tree
        page = tree.page_size
        leaf = tree.match(tree.root(()), key, request)
        cached = leaf.depth + leaf.tokens
        added = min(tokens - cached, reserved // page * page)
        if added > 0:
            self.pool.reserved -= added
            leaf = tree.append(leaf, tree.part(key, cached, added), None, request)
        self.prioritize(leaf, index)
        return leaf, reserved - max(0, added)

    def tell(self, now: float) -> None:
        """Tell the policy the time, unless it counts requests."""
        if self.in_seconds:
            clock = self.pool.clock
            clock.advance(max(now, clock.now))

    def finish(self, ended: Running) -> None:
        """End a request: cache its output, free its slots, unlock its prefix."""
        self.tell(ended.ends)
        self.release(ended)
        self.restore()
        self.load.ended(ended.number, ended.ends)

    def release(self, ended: Running) -> None:
        """Cache the output of a request, free its slots, unlock its prefix."""
        pool = self.pool
        reserved = ended.reserved if self.keys_after is None else self.cache_output(self.keys_after, ended)
        pool.reserved -= reserved
        pool.unpin(ended.node)
        pool.finish(ended.request, self.infos.of(ended.number, self.matched[ended.number]))

    def cache_output(self, keys: PageKeys, ended: Running) -> int:
        """Move the output's whole pages from the request to the tree; returns the slots it still owns."""
        tokens = int(keys.tokens[ended.number])
        if tokens <= self.whole[ended.number]:
            return ended.reserved  # the output completes no page
        # The prompt's partial last block has another id once the output fills it: its pages are cached twice.
        key = bytes(keys[ended.number])
        return self.extend(ended.number, key, tokens, ended.reserved, ended.request)[1]

    def prioritize(self, node: Node, index: int) -> None:
        """Give a request's nodes its priority."""
        if self.priorities is not None and self.priorities[index]:
            self.pool.raise_priority(node, self.priorities[index])

    def restore(self) -> None:
        """Restore the free target, as far as locks allow."""
        missing = min(self.reserve - self.pool.free, self.pool.evictable) if self.reserve else 0
        if missing > 0:
            before = time.perf_counter()
            self.pool.evict(missing, watermark=False)
            self.deciding += time.perf_counter() - before
