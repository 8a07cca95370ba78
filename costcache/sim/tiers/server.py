"""A server with tiers of memory: its queue, and the requests that run.

It has the queue of :mod:`costcache.sim.queueing`. A request keeps its prompt on the device, and room for its
output, until it ends; one that does not fit beside the others waits, and so do those after it (or the pool is
what those that run leave). It uses what the device has, loads what the tiers below it hold from there on
without a gap, if the policy of writing wants it, and computes the rest.

A load passes the link in order of arrival, layer by layer while the layers before are computed. So the first
token comes at ``max(load + compute / layers, compute + load / layers)`` after the start. What an eviction has
to write first keeps the start waiting. A policy of writing that works ahead of need begins to write for a
request that waits as soon as the one before it is computed.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from costcache.records import RequestRecord
from costcache.sim.load import load_of
from costcache.sim.loop import no_collector
from costcache.sim.queueing import serve_queue
from costcache.sim.requests import RequestInfos
from costcache.sim.steps import steps_of
from costcache.sim.tiers.demotion import Demotion
from costcache.sim.tiers.device import Device
from costcache.sim.tiers.lower import LowerTiers
from costcache.sim.tiers.moves import Moves
from costcache.sim.tiers.outcome import TieredOutcome
from costcache.sim.tiers.reloads import Reloads
from costcache.sim.tiers.tier import ExtentRecord, Tier
from costcache.sim.tiers.times import Times

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.binding import Binding
    from costcache.sim.requests import Known
    from costcache.sim.settings import ServingSettings
    from costcache.sim.tiers.extents import Extents
    from costcache.sim.tiers.lower import Below
    from costcache.sim.trace import Trace
    from costcache.sim.ttft import PrefillModel
    from costcache.tiers import Writing

__all__ = ["Running", "TieredServer"]


class Running(NamedTuple):
    """A running request; the earliest end sorts first.

    Attributes:
        ends: Seconds at which it ends.
        number: Its number in the trace, from 0.
        requests: Its record, of each tier.
        last: The last extent of its prompt on the device; None if that has none of it.
        reserved: Bytes on the device for what is in no extent.
    """

    ends: float
    number: int
    requests: list[RequestRecord]
    last: ExtentRecord | None
    reserved: int


class TieredServer:
    """A server with tiers; replays one trace once.

    Attributes:
        device: The device.
        lower: The tiers below it.
        tiers: The pools of all tiers, that of the device first.
        running: The requests that run, a heap.
    """

    def __init__(
        self,
        trace: Trace,
        of: Extents,
        binding: Binding,
        capacity: int,
        below: list[Below],
        writing: Writing,
        prefill: PrefillModel,
        settings: ServingSettings,
        *,
        known: Known = "server",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Make empty tiers.

        Args:
            trace: The requests, in order of time.
            of: Their extents.
            binding: The model, the policy and its settings; each tier makes an order of its own.
            capacity: Bytes of the device's pool, of one rank.
            below: The tiers below, from the fastest down.
            writing: What is copied down, and what is loaded.
            prefill: Seconds of a prefill.
            settings: The server; what concerns generated tokens is left out.
            known: What policies are told of requests.
            progress: Called now and then with the number of requests done since the last call.
        """
        self.of, self.prefill, self.settings = of, prefill, settings
        self.in_pool = settings.running == "in_pool"
        self.ahead = writing.ahead and bool(below)
        self.layers = max(1, binding.cost.spec.num_layers)
        token = binding.cost.token
        # In one pool of all layers, windows too: every token's window KV is cached.
        tier = Tier(binding, of, capacity, token.kv_bytes + token.swa_bytes, token.state_bytes)
        self.times = times = Times()
        self.lower = lower = LowerTiers(binding, below, tier, times, gives_up=writing.gives_up)
        moves = Moves(lower, prefill)
        self.demotion = Demotion(lower, moves, writing, times)
        self.device = Device(lower, self.demotion, times)
        self.reloads = Reloads(lower, moves, writing)
        self.tiers = [tier, *lower.tiers]
        self.load = load_of(settings, trace)
        self.infos = RequestInfos(trace, known)
        self.steps = steps_of(settings, trace, binding.page_size)
        self.inputs: list[int] = trace.input_tokens.tolist()
        self.outputs: list[int] = trace.output_tokens.tolist()
        self.progress = progress
        n = len(trace)
        self.outcome = TieredOutcome(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n))
        self.began = 0.0  # when the last prefill began
        self.running: list[Running] = []
        self.head: list[RequestRecord] = []  # of the head of the queue, once it was tried

    def run(self) -> TieredOutcome:
        """Replay the trace; returns the outcome."""
        started = time.perf_counter()
        with no_collector():
            serve_queue(
                self.load, self.running, self.settings.concurrency, self.start, self.finish, self.progress
            )
        outcome, lower = self.outcome, self.lower
        outcome.seconds = time.perf_counter() - started
        outcome.reload_seconds = lower.links.loading_seconds
        outcome.evicted = self.device.evicted
        outcome.tiers = dict(zip(lower.names, lower.moved, strict=True))
        outcome.policy = self.device.tier.pool.policy
        outcome.fallbacks = sum(tier.pool.fallbacks for tier in self.tiers)
        return outcome

    def start(self, index: int, now: float) -> float | None:
        """Serve a request from ``now`` on; returns when its first token is there, None if it has to wait."""
        device, of, outcome, times = self.device, self.of, self.outcome, self.times
        pool = device.tier.pool
        arrived = self.load.arrivals[index]
        times.now = now
        # While others are computed, room can be made for a request that waits.
        times.early = min(now, max(self.began, arrived)) if self.ahead else now
        pool.clock.advance(max(now, pool.clock.now))
        # A waiting request matches again: its prefix stays recent, and its use counts once.
        waits = bool(self.head)
        requests = self.head = self.head or self._begin(index)
        pool.clock.accesses += 1
        self.lower.follow()
        path = of.paths[index]
        here = device.match(path)
        end, loads = self.reloads.find(path, here)
        for tier, request in zip(self.tiers, requests, strict=True):
            tier.use(path, request)
        most = self.steps.most(self.inputs[index], self.outputs[index])  # tokens that it needs room for
        if self.in_pool and self.running and not device.fits(path, here, most, len(self.running)):
            outcome.memory_waits += not waits
            return None
        self.head = []
        has_states = device.tier.has_states
        if has_states and end:
            for tier in self.tiers:
                tier.resume(path[end - 1])
        found = self._found(index, path, here, end)
        for request in requests:
            request.matched = found
        branch = bool(here) and has_states and here < len(path) and of.ends_run[path[here - 1]]
        kept = device.cache(path, here, end, requests, branch=branch)
        last = kept[-1] if kept else None
        if last is not None:
            pool.pin(last)
        reserved = device.reserve(most - of.prefix(path, len(kept))) if self.in_pool else 0
        start = max(now, times.written)
        outcome.write_wait_seconds += start - now
        first_token = start + self._prefill(index, path, loads, found, start)
        self.began = times.early = start
        if kept:
            times.now = start
            if self.ahead:
                device.make_ahead(sum(of.tokens[path[at]] for at in range(here, len(kept))))
            times.now = times.early = first_token
            self.demotion.copy(kept)
        if len(kept) < len(path) and self.lower.tiers and not self.in_pool:
            times.now = times.early = first_token
            self.demotion.leave_beyond(path, len(kept), requests[1:])
        if last is not None and not self.in_pool:
            pool.unpin(last)
            last = None
        ends = first_token + max(0, self.outputs[index] - 1) * self.settings.decode_seconds
        heapq.heappush(self.running, Running(ends, index, requests, last, reserved))
        outcome.ttft[index] = first_token - arrived
        return first_token

    def finish(self, ended: Running) -> None:
        """End a request: free its memory, and unlock its prompt."""
        ends, index, requests, last, reserved = ended
        device = self.device.tier
        clock = device.pool.clock
        clock.advance(max(ends, clock.now))
        device.reserved -= reserved
        if last is not None:
            device.pool.unpin(last)
        found = int(self.outcome.device[index] + self.outcome.loaded[index])
        info = self.infos.of(index, found)
        for tier, request in zip(self.tiers, requests, strict=True):
            tier.pool.finish(request, info)
        self.load.ended(index, ends)

    def _begin(self, index: int) -> list[RequestRecord]:
        """The records of a request, of each tier."""
        asker = None if self.infos.askers is None else self.infos.askers[index]
        first = self.device.tier.pool.begin(asker)
        return [first, *(RequestRecord(first.number, first.in_seconds, asker) for _ in self.lower.tiers)]

    def _found(self, index: int, path: list[int], here: int, end: int) -> int:
        """Count what a request found; returns the tokens that need not be computed.

        Args:
            index: Its number.
            path: Its extents.
            here: How many of them the device has.
            end: How many of them need not be computed.
        """
        # The last token of a prompt is always computed.
        found = min(self.of.prefix(path, end), max(0, self.inputs[index] - 1))
        on_device = min(self.of.prefix(path, min(here, end)), found)
        self.outcome.device[index], self.outcome.loaded[index] = on_device, found - on_device
        return found

    def _prefill(
        self, index: int, path: list[int], loads: list[tuple[int, int]], found: int, start: float
    ) -> float:
        """Load what was found below, and compute the rest; returns the seconds from ``start`` on."""
        tokens, layers = self.inputs[index], self.layers
        load = self.reloads.load(path, loads, start)
        compute = self.prefill.one(max(1, tokens - found) if tokens else 0, found)
        self.outcome.recompute_seconds += compute
        return max(load + compute / layers, compute + load / layers) if load else compute
