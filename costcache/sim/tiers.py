"""Replay of a trace over tiers of memory: a device, its host's memory, and a disk.

One server, with the queue of :mod:`costcache.sim.load` and one prefill at a time. Its device pool caches
prompts only. A request keeps its prompt on the device, and room for its output, until it ends; one that does
not fit beside the others waits, and so do those after it (or the pool is what those that run leave). Each
tier is a :class:`~costcache.pool.Pool` of extents with an order of its own; an extent may be in several. A
request uses what the device has, loads what the tiers below it hold from there on without a gap, if the
policy of writing wants it, and computes the rest.

Time: a load passes the link in order of arrival, layer by layer while the layers before are computed. So
the first token comes at ``max(load + compute / layers, compute + load / layers)`` after the start. What an
eviction has to write first keeps the start waiting. Each direction of a link has a queue of its own.

Models with states: a state is at the end of a prompt, and where prompts were found to branch. One order
ranks KV and states, as in :class:`costcache.radix.states.StateTree`: a state is evicted with the last extent
before it, or alone if others follow, and KV after the last state goes before any state does. A state that a
longer one of its own session supersedes is dropped. A request resumes from a state of the device, or from one
that is loaded, alone if the device has the KV.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from costcache.records import NodeRecord, RequestRecord
from costcache.sim.doubles import Doubles
from costcache.sim.extents import ROOT, Extents
from costcache.sim.load import Load, load_kind
from costcache.sim.loop import PER_REPORT, no_collector
from costcache.sim.requests import RequestInfos
from costcache.sim.steps import steps_of
from costcache.sim.tier import ExtentRecord, Tier
from costcache.tiers import Link, Move, Writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.binding import Binding
    from costcache.sim.requests import Known
    from costcache.sim.settings import ServingSettings
    from costcache.sim.trace import Trace
    from costcache.sim.ttft import PrefillModel

__all__ = ["Below", "Moved", "TieredOutcome", "Tiers"]

_KEEPS = 0.98
"""Share of its weight that an average over evictions keeps at each one."""
_MOST_AHEAD = 10
"""Room is made ahead of need in one part of the device in so many, and for a state, at most."""
_SPENT = 0.5
"""Share of the bytes saved that may be spent on writing again what the host gave up."""


@dataclass(frozen=True)
class Below:
    """A tier below the device.

    Attributes:
        name: ``host`` or ``disk``.
        capacity: Bytes of one rank.
        bytes_per_second: Speed of its link to the tier above, in each direction.
        latency: Seconds that each transfer takes besides.
    """

    name: str
    capacity: int
    bytes_per_second: float
    latency: float = 0.0


@dataclass
class Moved:
    """What a tier below the device did.

    Attributes:
        hits: Tokens that requests loaded from it.
        found: Tokens that requests found in it, loaded or not.
        down: Bytes written to it.
        up: Bytes loaded from it.
        evicted: Bytes evicted from it.
        given_up: Bytes of copies that it gave up while the device had them.
        refused: Bytes that were to be written, and found no room.
        peak: Most bytes that it held.
    """

    hits: int = 0
    found: int = 0
    down: int = 0
    up: int = 0
    evicted: int = 0
    given_up: int = 0
    refused: int = 0
    peak: int = 0


@dataclass
class TieredOutcome:
    """The result of a replay.

    Attributes:
        device: Tokens that each request found on the device, int64 of shape [requests].
        loaded: Tokens that it loaded, likewise.
        ttft: Seconds from arrival to first token, queue included, float64 of shape [requests].
        reload_seconds: Seconds that links were busy with loads.
        recompute_seconds: Seconds of all prefills.
        write_wait_seconds: Seconds that requests waited for evictions to be written.
        memory_waits: Requests that waited, since they did not fit on the device beside those that ran.
        evicted: Bytes evicted from the device.
        tiers: What each tier below did, by name.
        seconds: Wall time of the replay.
        policy: Policy in force on the device at the end.
        fallbacks: Orders that failed and were replaced by LRU.
    """

    device: NDArray[np.int64]
    loaded: NDArray[np.int64]
    ttft: NDArray[np.float64]
    reload_seconds: float = 0.0
    recompute_seconds: float = 0.0
    write_wait_seconds: float = 0.0
    memory_waits: int = 0
    evicted: int = 0
    tiers: dict[str, Moved] = field(default_factory=dict)
    seconds: float = 0.0
    policy: str = ""
    fallbacks: int = 0


class _Running(NamedTuple):
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


class Tiers:
    """A server with tiers; replays one trace once."""

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
        self.trace, self.of, self.writing, self.prefill, self.settings = trace, of, writing, prefill, settings
        token = binding.cost.token
        self.cost = binding.cost
        self.in_pool = settings.running == "in_pool"
        self.layers = max(1, binding.cost.spec.num_layers)
        # In one pool of all layers, windows too: every token's window KV is cached.
        token_bytes, state_bytes = token.kv_bytes + token.swa_bytes, token.state_bytes
        self.has_states = bool(state_bytes)
        self.device = Tier(
            binding, of, capacity, token_bytes, state_bytes, None, self._evicted, self._evicted_state
        )
        if below:
            self.device.pool.over_tier()
        self.tiers = [
            Tier(binding, of, each.capacity, token_bytes, state_bytes, self.device, *self._drops(level))
            for level, each in enumerate(below)
        ]
        self.down = [Link(each.bytes_per_second, each.latency) for each in below]
        self.up = [Link(each.bytes_per_second, each.latency) for each in below]
        self.moved = [Moved() for _ in below]
        self.below = below
        self.all = [self.device, *self.tiers]
        self.doubles = Doubles()
        if self.tiers and writing.gives_up:
            self.tiers[0].spare = self._give_up
        self.need = 0.0  # bytes of a request that were not on the device, about the most of late
        self.load = Load(
            trace,
            load_kind(settings.load, trace),
            clients=settings.concurrency,
            rate=settings.rate,
            spread=settings.spread_bursts,
        )
        self.infos = RequestInfos(trace, known)
        self.steps = steps_of(settings, trace, binding.page_size)
        self.inputs: list[int] = trace.input_tokens.tolist()
        self.outputs: list[int] = trace.output_tokens.tolist()
        self.progress = progress
        n = len(trace)
        self.outcome = TieredOutcome(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n))
        self.now = 0.0
        self.began = 0.0  # when the last prefill began
        self.early = 0.0  # from when on evictions for the request that is served write
        self.written = 0.0  # when the writes that evictions wait for are over
        self.running: list[_Running] = []
        self.head: list[RequestRecord] = []  # of the head of the queue, once it was tried

    # -- the server --------------------------------------------------------------------------

    def run(self) -> TieredOutcome:
        """Replay the trace; returns the outcome."""
        started = time.perf_counter()
        with no_collector():
            self._run()
        outcome = self.outcome
        outcome.seconds = time.perf_counter() - started
        outcome.tiers = {each.name: moved for each, moved in zip(self.below, self.moved, strict=True)}
        outcome.policy = self.device.pool.policy
        outcome.fallbacks = sum(tier.pool.fallbacks for tier in (self.device, *self.tiers))
        return outcome

    def _run(self) -> None:
        load, limit = self.load, self.settings.concurrency
        waiting: deque[int] = deque()
        running = self.running
        free_at, now, done, reported = 0.0, 0.0, 0, 0
        while True:
            if not waiting:
                arrives = load.next_time()
                ends = running[0].ends if running else None
                times = [at for at in (arrives, ends) if at is not None]
                if not times:
                    break
                now = max(now, min(times))
            now = max(now, free_at)
            while True:
                arrives = load.next_time()
                if running and running[0].ends <= now and (arrives is None or running[0].ends <= arrives):
                    self._finish(heapq.heappop(running))
                elif arrives is not None and arrives <= now:
                    waiting.append(load.take())
                else:
                    break
            if not waiting:
                continue
            started = self._serve(waiting[0], now) if len(running) < limit else None
            if started is None:
                now = max(now, running[0].ends)  # frees a place, and the memory of a request
                continue
            index = waiting.popleft()
            free_at = started
            self.outcome.ttft[index] = free_at - load.arrivals[index]
            done += 1
            if self.progress is not None and done - reported >= PER_REPORT:
                self.progress(done - reported)
                reported = done
        if self.progress is not None:
            self.progress(done - reported)

    def _finish(self, ended: _Running) -> None:
        ends, index, requests, last, reserved = ended
        device = self.device
        clock = device.pool.clock
        clock.advance(max(ends, clock.now))
        device.reserved -= reserved
        if last is not None:
            device.pool.unpin(last)
        found = int(self.outcome.device[index] + self.outcome.loaded[index])
        info = self.infos.of(index, found)
        for tier, request in zip(self.all, requests, strict=True):
            tier.pool.finish(request, info)
        self.load.ended(index, ends)

    # -- one request -------------------------------------------------------------------------

    def _serve(self, index: int, now: float) -> float | None:
        """Serve a request from ``now`` on; returns when its first token is there, None if it has to wait."""
        device, of, outcome = self.device, self.of, self.outcome
        clock = device.pool.clock
        self.now = now
        # While others are computed, room can be made for a request that waits.
        self.early = min(now, max(self.began, self.load.arrivals[index])) if self.writing.ahead else now
        clock.advance(max(now, clock.now))
        # A waiting request matches again: its prefix stays recent, and its use counts once.
        waits = bool(self.head)
        requests = self.head = self.head or self._begin(index)
        clock.accesses += 1
        for tier in self.tiers:
            tier.follow()
        path = of.paths[index]
        here = 0
        while here < len(path) and path[here] in device.records:
            here += 1
        usable = self._usable(path, here)
        loads = self._loads(path, usable, here)
        end = loads[-1][0] + 1 if loads else usable
        for tier, request in zip(self.all, requests, strict=True):
            known: list[NodeRecord] = [tier.records[each] for each in path if each in tier.records]
            tier.pool.use(known, request)
        if self.in_pool and self.running and not self._fits(index, path, here):
            outcome.memory_waits += not waits
            return None
        self.head = []
        if self.has_states and end:
            for tier in self.all:
                resumed = tier.records.get(path[end - 1])
                if resumed is not None and resumed.state is not None:
                    tier.pool.consume(resumed)
        # The last token of a prompt is always computed.
        tokens = self.inputs[index]
        found = min(self._tokens(path, end), max(0, tokens - 1))
        on_device = min(self._tokens(path, min(here, end)), found)
        outcome.device[index], outcome.loaded[index] = on_device, found - on_device
        for request in requests:
            request.matched = found
        branch = bool(here) and self.has_states and here < len(path) and of.ends_run[path[here - 1]]
        kept = self._cache(path, here, end, requests, branch=branch)
        if kept:
            device.pool.pin(kept[-1])
        reserved = 0
        if self.in_pool:
            reserved = self._reserve(self._most(index) - self._tokens(path, len(kept)))
        start = max(now, self.written)
        outcome.write_wait_seconds += start - now
        load = self._load(path, loads, start)
        compute = self.prefill.one(max(1, tokens - found) if tokens else 0, found)
        outcome.recompute_seconds += compute
        layers = self.layers
        took = max(load + compute / layers, compute + load / layers) if load else compute
        self.began = self.early = start
        if kept:
            self.now = start
            self._make_ahead(sum(of.tokens[path[at]] for at in range(here, len(kept))))
            self.now = self.early = start + took
            self._copy(kept)
        if len(kept) < len(path) and self.tiers and not self.in_pool:
            self.now = self.early = start + took
            self._leave_beyond(path, len(kept), requests)
        first_token = start + took
        ends = first_token + max(0, self.outputs[index] - 1) * self.settings.decode_seconds
        last = kept[-1] if kept else None
        if last is not None and not self.in_pool:
            device.pool.unpin(last)
            last = None
        heapq.heappush(self.running, _Running(ends, index, requests, last, reserved))
        return first_token

    def _begin(self, index: int) -> list[RequestRecord]:
        """The records of a request, of each tier."""
        asker = None if self.infos.askers is None else self.infos.askers[index]
        first = self.device.pool.begin(asker)
        return [first, *(RequestRecord(first.number, first.in_seconds, asker) for _ in self.tiers)]

    def _fits(self, index: int, path: list[int], here: int) -> bool:
        """Whether a request fits on the device, which has the first ``here`` extents of its prompt."""
        device = self.device
        while here and not device.records[path[here - 1]].locks:
            here -= 1
        needed = (self._most(index) - self._tokens(path, here)) * device.token_bytes
        in_use = device.pool.pinned * device.token_bytes + device.reserved
        # Each request has a state; the others can be evicted.
        states = (len(self.running) + 1) * device.state_bytes
        return in_use + needed + states <= device.capacity

    def _most(self, index: int) -> int:
        """Tokens that a request needs room for, whole pages."""
        return self.steps.most(self.inputs[index], self.outputs[index])

    def _reserve(self, tokens: int) -> int:
        """Keep room on the device for tokens in no extent; returns the bytes, fewer if it is full."""
        device = self.device
        size = tokens * device.token_bytes
        if not device.make_room(size):
            size = max(0, device.capacity - device.used - device.reserved)
        device.reserved += size
        return size

    def _tokens(self, path: list[int], count: int) -> int:
        return self.of.depths[path[count - 1]] + self.of.tokens[path[count - 1]] if count else 0

    def _usable(self, path: list[int], here: int) -> int:
        """Extents on the device that a request can use: up to the last state, if the model has states."""
        if self.has_states:
            while here and not self.device.records[path[here - 1]].has_state:
                here -= 1
        return here

    def _loads(self, path: list[int], usable: int, here: int) -> list[tuple[int, int]]:
        """Extents to load, as positions in the path, and the tier of each; -1 for what the device has.

        Those are the extents from the usable end on, as far as there is no gap. The last ones are left out as
        long as no request can resume from their end, or the policy would rather compute them.
        """
        found: list[tuple[int, int]] = []
        for at in range(usable, len(path)):
            level = -1 if at < here else self._level(path[at])
            if level is None:
                break
            found.append((at, level))
        start = self._tokens(path, usable)
        while found:
            at, level = found[-1]
            resumes = self._state_level(path[at]) is not None if self.has_states else level >= 0
            if resumes and self.writing.loads(self._pending(path, found, start)):
                break
            found.pop()
        return found

    def _level(self, extent: int) -> int | None:
        """The fastest tier below the device that holds an extent; None if none does."""
        return next((level for level, tier in enumerate(self.tiers) if tier.held(extent)), None)

    def _state_level(self, extent: int) -> int | None:
        """The fastest tier below the device that has a state at the end of an extent; None if none does."""
        for level, tier in enumerate(self.tiers):
            held = tier.held(extent)
            if held is not None and held.has_state:
                return level
        return None

    def _pending(self, path: list[int], found: list[tuple[int, int]], start: int) -> Move:
        """A load of several extents as one move."""
        sizes = self._sizes(path, found)
        stop = self._tokens(path, found[-1][0] + 1)
        recompute = self.prefill.more(stop - start, start)
        return Move(stop - start, sum(sizes), 1, recompute, self._reload_seconds(sizes, queued=True))

    def _sizes(self, path: list[int], found: list[tuple[int, int]]) -> list[int]:
        """Bytes to load from each tier: KV of the extents, and the last state alone."""
        sizes = [0] * len(self.tiers)
        for at, level in found:
            if level >= 0:
                sizes[level] += self.of.tokens[path[at]] * self.device.token_bytes
        state = self._state_level(path[found[-1][0]]) if self.has_states and found else None
        if state is not None:
            sizes[state] += self.device.state_bytes
        return sizes

    def _reload_seconds(self, sizes: list[int], *, queued: bool) -> float:
        """Seconds to load so many bytes of each tier; those of a lower one pass the links above it too.

        Args:
            sizes: Bytes by tier.
            queued: After what waits for the links now; False for a load at some other time.
        """
        took, through = 0.0, 0
        for level in range(len(sizes) - 1, -1, -1):
            through += sizes[level]
            seconds = self.up[level].seconds(through, self.now)
            took = max(took, seconds if queued else seconds - self.up[level].waits(self.now))
        return took

    def _load(self, path: list[int], loads: list[tuple[int, int]], start: float) -> float:
        """Load extents; returns the seconds from ``start`` on."""
        if not loads:
            return 0.0
        sizes = self._sizes(path, loads)
        until, through = start, 0
        for level in range(len(sizes) - 1, -1, -1):
            through += sizes[level]
            if through:
                self.moved[level].up += through
                self.outcome.reload_seconds += through / self.up[level].bytes_per_second
                until = max(until, self.up[level].begin(through, start))
        for at, level in loads:
            if level >= 0:
                self.moved[level].hits += self.of.tokens[path[at]]
        return until - start

    # -- the device --------------------------------------------------------------------------

    def _cache(
        self, path: list[int], here: int, end: int, requests: list[RequestRecord], *, branch: bool
    ) -> list[ExtentRecord]:
        """Cache a prompt on the device as far as it fits; returns its records.

        Args:
            path: Its extents.
            here: How many of them the device has.
            end: How many of them need not be computed; a load brings the state at its end.
            requests: The request's record, of each tier.
            branch: Whether prompts branch where what the device has ends.
        """
        device, pool = self.device, self.device.pool
        records = [device.records[extent] for extent in path[:here]]
        if records:
            pool.pin(records[-1])
        if self.has_states and 0 < end <= here:
            self._give_state(records[end - 1])  # a load may bring no more than that
        if branch:
            self._give_state(records[-1])
        for at in range(here, len(path)):
            extent = path[at]
            # A state is at the prompt's end, and where a load resumes.
            state = self.has_states and at in (len(path) - 1, end - 1)
            if not device.make_room(device.size(extent, state)):
                break
            record = device.track(extent, requests[0])
            device.hold(record, state)
            if records:
                pool.unpin(records[-1])
            pool.pin(record)
            records.append(record)
            for tier, request in zip(self.tiers, requests[1:], strict=True):
                copy = tier.records.get(extent) or tier.track(extent, request)
                if copy.held and tier is self.tiers[0]:
                    self.doubles.add(extent, self.now)
                if not copy.pins:
                    tier.pool.pin(copy)
                if state:
                    tier.track_state(copy, True)
        if records:
            last = records[-1]
            if self.has_states and len(records) == len(path):
                self._give_state(last)
            self._supersede(records)
            pool.unpin(last)
        return records

    def _give_state(self, record: ExtentRecord) -> None:
        """Keep a state at the end of an extent of the device, if there is room."""
        if record.has_state or not self.device.make_room(self.device.state_bytes):
            return
        self.device.give_state(record, True)
        for tier in self.tiers:
            tier.track_state(tier.records[record.extent], True)

    def _forget_state(self, record: ExtentRecord) -> None:
        """The device drops a state: so do the tiers below, unless it is there or in one between."""
        kept = False
        for tier in self.tiers:
            copy = tier.records[record.extent]
            kept |= copy.has_state
            tier.track_state(copy, kept)

    def _supersede(self, records: list[ExtentRecord]) -> None:
        """Drop the state before a new one, unless other prompts branch there."""
        if not self.has_states or not records[-1].has_state:
            return
        for record in reversed(records[:-1]):
            if record.live_children > 1:
                return
            if record.has_state:
                self.device.give_state(record, False)
                self._forget_state(record)
                return

    def _make_ahead(self, tokens: int) -> None:
        """Make room for the next request while this one is computed, if the policy writes ahead of need.

        What is below already can wait: nobody would wait for its eviction, and a request may want it still.
        """
        if not self.writing.ahead or not self.tiers:
            return
        device, pool = self.device, self.device.pool
        # A request leaves a state too, if the model has them.
        self.need = max(self.need * _KEEPS, float(tokens * device.token_bytes + device.state_bytes))
        room = min(int(self.need), device.capacity // _MOST_AHEAD + device.state_bytes)
        while device.capacity - device.used - device.reserved < room and pool.evictable:
            victim = pool.next_victim({})
            if victim is None:
                return
            pool.defer(victim)
            record: Any = victim.record
            below = self.tiers[0].held(record.extent)
            if below is not None and below.has_state >= record.has_state:
                return
            if not pool.evict(1, watermark=False).freed:
                return

    def _evicted(self, record: ExtentRecord) -> None:
        """An extent is evicted from the device: write it down first, or drop it."""
        self.outcome.evicted += self.device.size(record.extent, record.has_state)
        self.doubles.evicted(record.extent, max(0.0, self.now - record.since))
        self.written = max(self.written, self._leave(record, 0))

    def _evicted_state(self, record: ExtentRecord) -> None:
        """A state is evicted from the device alone."""
        self.outcome.evicted += self.device.state_bytes
        self.written = max(self.written, self._leave_state(record, 0))
        self._forget_state(record)

    # -- the tiers below ---------------------------------------------------------------------

    def _leave_beyond(self, path: list[int], kept: int, requests: list[RequestRecord]) -> None:
        """What a prompt has beyond the device's pool is copied below from where the request ran, or dropped.

        As for any eviction, but that nobody waits for it.
        """
        beyond = []
        before = self.device.records[path[kept - 1]] if kept else None
        for at in range(kept, len(path)):
            leaves = ExtentRecord(path[at], None, self.of)
            leaves.has_state = self.has_states and at == len(path) - 1
            for tier, request in zip(self.tiers, requests[1:], strict=True):
                copy = tier.records.get(path[at]) or tier.track(path[at], request)
                if not copy.pins:
                    tier.pool.pin(copy)
                if before is not None:
                    tier.pool.inherit(copy, before)
                if leaves.has_state:
                    tier.track_state(copy, True)
            beyond.append(leaves)
        self._copy(beyond)
        for leaves in reversed(beyond):  # as the device evicts: leaves first
            self._leave(leaves, 0)

    def _leave(self, record: ExtentRecord, level: int) -> float:
        """An extent leaves the tier above ``level``; returns when what is written of it is there."""
        if level == len(self.tiers):
            return self.now
        tier = self.tiers[level]
        copy = tier.records[record.extent]
        tier.pool.inherit(copy, record)
        written = self.now
        if copy.held:
            if record.has_state:
                written = self._leave_state(record, level)
        else:
            move = self._move(copy, level, record.has_state, waits=level == 0)
            if self.writing.demotes(move):
                written = self._write(copy, level, record.has_state)
            else:
                tier.price.lost(move, tier.capacity)
                self.doubles.saved += move.size if level == 0 else 0
        tier.track_state(copy, copy.has_state)
        if copy.pins:
            tier.pool.unpin(copy)  # only now: what is pinned makes no room for itself
        if copy.held:
            return written
        tier.drop(copy)
        return self._leave(record, level + 1)

    def _leave_state(self, record: ExtentRecord, level: int) -> float:
        """A state leaves the tier above ``level``, but its KV need not; returns when it is written."""
        if level == len(self.tiers):
            return self.now
        copy = self.tiers[level].records[record.extent]
        if copy.has_state:
            return self.now
        move = self._move(copy, level, True, waits=level == 0, alone=copy.held)
        if not self.writing.demotes(move):
            return self.now
        return self._write_state(copy, level) if copy.held else self._write(copy, level, True)

    def _give_up(self) -> bool:
        """Let the host give up a copy of what the device has had for long, if it may be written again."""
        doubles, host, moved = self.doubles, self.tiers[0], self.moved[0]
        while (extent := doubles.first(self.now)) is not None:
            copy, above = host.records[extent], self.device.records[extent]
            if copy.held and copy.has_state <= above.has_state:
                size = host.size(extent, copy.has_state)
                if moved.given_up + size > _SPENT * (doubles.saved + self._not_loaded()):
                    return False
                host.give_up(copy)
                moved.given_up += size
                doubles.remove(extent)
                return True
            doubles.remove(extent)
        return False

    def _not_loaded(self) -> int:
        """Bytes that were not loaded since the device found more than it would have found under LRU."""
        verdict = self.device.pool.order.against_lru()
        return 0 if verdict is None else max(0, verdict.gained - verdict.lost) * self.device.token_bytes

    def _drops(self, level: int) -> tuple[Callable[[ExtentRecord], None], Callable[[ExtentRecord], None]]:
        """What happens when the tier at ``level`` evicts an extent, and when it evicts a state alone."""

        def evicted(record: ExtentRecord) -> None:
            tier = self.tiers[level]
            size = tier.size(record.extent, record.has_state)
            self.moved[level].evicted += size
            tier.price.lost(self._move(record, level, record.has_state, waits=False), tier.capacity)
            stayed = max(0.0, self.now - record.since)
            tier.stays = stayed if tier.stays == math.inf else tier.stays * _KEEPS + stayed * (1 - _KEEPS)
            self._leave(record, level + 1)

        def evicted_state(record: ExtentRecord) -> None:
            tier = self.tiers[level]
            self.moved[level].evicted += tier.state_bytes
            move = self._move(record, level, True, waits=False, alone=True)
            tier.price.lost(move, tier.capacity)
            self._leave_state(record, level + 1)

        return evicted, evicted_state

    def _move(
        self, copy: ExtentRecord, level: int, has_state: bool, *, waits: bool, alone: bool = False
    ) -> Move:
        """The facts of an extent that a tier may hold, or holds; or of its state ``alone``.

        A state is worth all that it saves computing, back to the state before it, and is of no use without
        the KV in between, which is written after it.
        """
        tier, extent = self.tiers[level], copy.extent
        size = tier.state_bytes if alone else tier.size(extent, has_state)
        start, lacks = copy.depth, 0
        if self.has_states:
            start, lacks = self._resumes_before(copy, level)
        recompute = self.prefill.more(copy.end - start, start)
        if self.has_states and not has_state:
            lacks = 0
            if not copy.live_children:
                recompute = 0.0  # no request can resume from it
        sizes = [0] * len(self.tiers)
        sizes[level] = (copy.end - start) * tier.token_bytes + tier.state_bytes if has_state else size
        reload = self._reload_seconds(sizes, queued=False)
        for lower in range(level + 1, len(self.tiers)):
            if self.tiers[lower].held(extent):
                sizes[level], sizes[lower] = 0, sizes[level]
                recompute = min(recompute, self._reload_seconds(sizes, queued=True))
                break
        missing = tier.used + tier.reserved + size + lacks - tier.capacity
        return Move(
            copy.tokens,
            size,
            copy.uses,
            recompute,
            reload,
            chance=tier.pool.reuse_chance(copy, tier.stays),
            write=self.down[level].seconds(size + lacks, self.now) if waits else 0.0,
            displaced=tier.price.displaced(min(missing, size + lacks), tier.pool.order),
            followed=copy.live_children > 0 and not alone,
        )

    def _resumes_before(self, copy: ExtentRecord, level: int) -> tuple[int, int]:
        """Tokens up to the last state before an extent on its tier or on the device, and bytes after it.

        The bytes are those of the KV up to the extent that the tier does not hold.
        """
        tier, above, lacks = self.tiers[level], self.of.parents[copy.extent], 0
        while above != ROOT:
            there = tier.records.get(above)
            for record in (there, self.device.records.get(above)):
                if record is not None and record.has_state:
                    return record.end, lacks
            if there is None or not there.held:
                lacks += tier.size(above, False)
            above = self.of.parents[above]
        return 0, lacks

    def _write(self, copy: ExtentRecord, level: int, has_state: bool) -> float:
        """Write an extent to a tier, if there is room; returns when it is there."""
        tier, moved = self.tiers[level], self.moved[level]
        size = tier.size(copy.extent, has_state)
        if not tier.make_room(size):
            moved.refused += size
            return self.now
        tier.hold(copy, has_state)
        return self._sent(size, level)

    def _write_state(self, copy: ExtentRecord, level: int) -> float:
        """Write the state of an extent that a tier holds without one, if there is room."""
        tier = self.tiers[level]
        if not tier.make_room(tier.state_bytes):
            self.moved[level].refused += tier.state_bytes
            return self.now
        tier.give_state(copy, True)
        return self._sent(tier.state_bytes, level)

    def _sent(self, size: int, level: int) -> float:
        moved = self.moved[level]
        moved.down += size
        moved.peak = max(moved.peak, self.tiers[level].used)
        return self.down[level].begin(size, self.early)

    def _copy(self, records: list[ExtentRecord]) -> None:
        """Copy what the policy wants of a prompt that the device has now, unless evictions do that."""
        for level, tier in enumerate(self.tiers):
            for record in records:
                copy = tier.records[record.extent]
                if copy.held:
                    if record.has_state and not copy.has_state:
                        self._write_state(copy, level)
                elif self.writing.ahead or (level and not self.tiers[level - 1].held(record.extent)):
                    continue
                elif self.writing.copies(self._move(copy, level, record.has_state, waits=False)):
                    self._write(copy, level, record.has_state)
