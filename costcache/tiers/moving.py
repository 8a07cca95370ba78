"""Moves prefixes between the tiers: what is copied when, and what becomes of it once it is copied.

A copy is prepared on the caller's thread: slots are reserved, sources are pinned or, if they are about to be
evicted, read. The thread of a link moves the bytes. :meth:`Mover.step` collects what all ranks have
finished, in the order of submission, and only then does a tree change. So trees depend on the stream of
calls alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from costcache.radix.node import Node, shared_pages
from costcache.records import RequestRecord
from costcache.tiers.buffers import Rows, packed
from costcache.tiers.copies import Copies, Job
from costcache.tiers.links import Link
from costcache.tiers.lower import DiskTier, HostTier, LowerTier, Place, place_of
from costcache.tiers.writing import Move, Price, Writing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costcache.cost import CostModel
    from costcache.pool import Pool
    from costcache.tiers.buffers import Buffers
    from costcache.tiers.layout import Layout
    from costcache.tiers.ranks import Ranks

__all__ = ["Line", "Load", "Mover", "TierCounters"]

_NO_SLOTS: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(slots=True)
class TierCounters:
    """Counts of one lower tier since the cache was made, in tokens unless said otherwise.

    Attributes:
        hits: Tokens that matches found here and not in a faster tier.
        written: Tokens that were copied here.
        loaded: Tokens that were copied from here to the next faster tier.
        demoted: Those of ``written`` that were about to be evicted.
        refused: Tokens that the policy of writing found worth no copy when they were evicted.
        skipped: Tokens that were not copied, since too many bytes were under way or there was no room.
        lost: Tokens whose copy failed, or that came back damaged or not at all.
        bytes_in: Bytes copied here.
        bytes_out: Bytes copied from here.
    """

    hits: int = 0
    written: int = 0
    loaded: int = 0
    demoted: int = 0
    refused: int = 0
    skipped: int = 0
    lost: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Line:
    """A link between two neighbouring tiers: the thread that copies, and the estimate of its speed.

    Attributes:
        copies: The thread and its queue.
        link: Speed and queue; told of transfers when all ranks have finished them.
        writes: Prefixes that are being copied down, with the token where each begins.
    """

    def __init__(self, copies: Copies, bytes_per_second: float) -> None:
        self.copies = copies
        self.link = Link(bytes_per_second)
        self.writes: list[tuple[Place, int]] = []

    def submit(self, work: Callable[[], int], collected: Callable[[int], object], size: int) -> Job:
        """Queue a copy of ``size`` bytes."""
        self.link.begin(size, 0.0)
        job = Job(work, collected, size)
        self.copies.submit(job)
        return job

    def covered(self, place: Place, page_bytes: int, page_size: int) -> int:
        """Tokens of a prefix that copies under way will have brought down, if none of them fails."""
        best = 0
        for other, _ in self.writes:
            if other.namespace == place.namespace:
                pages = shared_pages(place.key, memoryview(other.key), page_bytes)
                best = max(best, pages * page_size)
        return best


class Load:
    """A prefix on its way to the device.

    Attributes:
        place: The prefix.
        start: Tokens of it that the device had.
        end: Tokens of it that the device will have.
        done: Whether nothing more happens: it is loaded, in part or whole, or cancelled, or failed.
        cancelled: Whether nobody wants it any more.
        loaded: Tokens that were copied to the device.
        node: The device's node at its end, locked until the load is resumed or cancelled; None before.
        owner: The cache that began it.
    """

    def __init__(self, place: Place, start: int, end: int, request: Hashable) -> None:
        self.place = place
        self.start = start
        self.end = end
        self.request = request
        self.done = False
        self.cancelled = False
        self.loaded = 0
        self.node: Node | None = None
        self.owner: object = None
        self._line: Line | None = None
        self._until = 0

    def __repr__(self) -> str:
        how = "cancelled" if self.cancelled else "done" if self.done else "under way"
        return f"Load([{self.start}, {self.end}), {how}, {self.loaded} loaded)"


class _Snapshot:
    """The bytes of what is about to be evicted, read at once."""

    def __init__(self, buffers: Buffers, slots: NDArray[np.int64], state: int | None) -> None:
        self.state: list[Any] = []
        self._rows: list[Any] = []
        self._error: BaseException | None = None
        try:
            self._rows = buffers.tokens.read(slots)
            if state is not None:
                self.state = _states(buffers).read(_one(state))
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError where there is no memory
            self._error = error  # of this rank alone: the copy fails, and with it that of the others

    def rows(self) -> list[Any]:
        """The rows of the tokens.

        Raises:
            RuntimeError: They could not be read.
        """
        if self._error is not None:
            raise self._error
        return self._rows


class Mover:
    """The copies between the device, the host and the disk.

    Attributes:
        device: The device's cache.
        host: The host tier.
        disk: The disk tier; None without any.
        lines: The links: device to host, and host to disk.
        counters: Counts by tier.
    """

    def __init__(
        self,
        device: Any,
        buffers: Buffers,
        layout: Layout,
        cost: CostModel,
        host: HostTier,
        host_line: Line,
        disk: DiskTier | None,
        disk_line: Line | None,
        writing: Writing,
        in_flight: int,
        ranks: Ranks,
    ) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.lines = [host_line] if disk_line is None else [host_line, disk_line]
        self.counters = {"host": TierCounters(), "disk": TierCounters()}
        self._buffers = buffers
        self._layout = layout
        self._cost = cost
        self._host_line = host_line
        self._disk_line = disk_line
        self._writing = writing
        self._in_flight = in_flight
        self._ranks = ranks
        self._tree = device._tree
        self._pool: Pool = device._pool
        self._page_size: int = device.page_size
        self._nobody = RequestRecord(0)
        self._prices = {"host": Price(), "disk": Price()}
        self._copies = writing.name != "write_back"
        self._demotes = writing.name in {"write_back", "by_cost"}

    # -- decisions ---------------------------------------------------------------------------

    def _move(self, node: Node, start: int, line: Line, tier: LowerTier, via: Line | None = None) -> Move:
        """The facts of the part of a node from token ``start`` on, on its way down to a tier."""
        tokens = node.end - start
        size = tokens * self._layout.token_bytes
        first = start
        if node.state is not None:
            size += self._layout.state_bytes
            first = max(0, node.end - node.replay)
        reload = line.link.seconds(size, 0.0)
        if via is not None:
            reload += via.link.seconds(size, 0.0)
        pool = tier.pool
        units = tokens * pool.token_units + (pool.state_units if node.state is not None else 0)
        missing = size * (units - pool.free) / units if units > pool.free else 0.0
        return Move(
            tokens=tokens,
            size=size,
            uses=node.uses,
            recompute=self._cost.recompute_seconds(min(first, start), node.end),
            reload=reload,
            chance=self._pool.reuse_chance(node),
            write=size / line.link.bytes_per_second,
            displaced=self._prices[tier.name].displaced(missing, self._pool.order),
        )

    def _lost(self, move: Move, tier: LowerTier) -> None:
        """A tier has evicted a node, or refused it: that is what its room is worth."""
        pool = tier.pool
        self._prices[tier.name].lost(move, pool.capacity * self._layout.token_bytes / pool.token_units)

    def _reach(self, node: Node, tier: LowerTier, line: Line) -> tuple[Place, Node, int]:
        """A prefix, the node at its end in a slower tier, and the tokens that are there or on their way."""
        place = place_of(node)
        at = tier.find(place)
        return place, at, max(at.end, line.covered(place, tier.tree.page_bytes, self._page_size))

    # -- down: device to host ----------------------------------------------------------------

    def copy_down(self, node: Node) -> None:
        """Copy the prefix of a device node to the host, as far as the policy of writing wants it."""
        host = self.host
        if not self._copies or node.parent is None:
            return
        _, at, start = self._reach(node, host, self._host_line)
        last = self._wanted(node, start, at, self._host_line, host)
        if last is None:
            return
        end = last.end
        self._tree.pin(last)
        if not self._down(last, place_of(last), min(start, end), pinned=True):
            self._tree.unpin(last)

    def _wanted(self, node: Node, start: int, at: Node, line: Line, tier: LowerTier) -> Node | None:
        """The deepest node of a path that a slower tier lacks, and that the policy wants copied there now."""
        last = None
        for part in node.path():
            lacks_state = part.end == at.end and part.state is not None and at.state is None
            if part.end <= start and not (lacks_state and part is node and start == at.end):
                continue
            if tier.has_states and part.state is None:
                continue  # what is before the next state goes with it
            if not self._writing.copies(self._move(part, max(part.depth, min(start, part.end)), line, tier)):
                break
            last = part
        return last

    def demote(self, node: Node) -> None:
        """A node of the device, or its state, is about to be evicted: copy it down if it is worth it."""
        host = self.host
        if not self._demotes or node.parent is None or (host.has_states and node.state is None):
            return
        place, at, start = self._reach(node, host, self._host_line)
        if start >= node.end and (node.state is None or at.state is not None or at.end != node.end):
            return
        move = self._move(node, min(max(node.depth, start), node.end), self._host_line, host)
        if not self._writing.demotes(move):
            self.counters["host"].refused += move.tokens
            self._lost(move, host)
            return
        self._down(node, place, min(start, node.end), pinned=False)

    def _down(self, node: Node, place: Place, start: int, *, pinned: bool) -> bool:
        """Copy a device node's prefix from ``start`` on; without a pin its bytes are read at once."""
        host = self.host
        line, counters = self._host_line, self.counters["host"]
        tokens = node.end - start
        slots = _slots(node)[start : node.end]
        source_state = None if node.state is None else node.state.slot
        at = host.find(self._first(place, start))
        if source_state is not None and tokens == 0 and at.state is not None:
            return False
        size = tokens * self._layout.token_bytes + (
            self._layout.state_bytes if source_state is not None else 0
        )
        if line.copies.in_flight + size > self._in_flight:
            counters.skipped += tokens
            return False
        host.pool.pin(at)
        target, state = host.reserve(at, tokens, int(source_state is not None))
        if target.size < tokens or (source_state is not None and state is None):
            host.release(target, state)  # half a prefix, or KV without its state, is of little use
            host.pool.unpin(at)
            counters.skipped += tokens
            return False
        device, memory = self._buffers, host.buffers
        copied = None if pinned else _Snapshot(device, slots, source_state)

        def work() -> int:
            if copied is None:
                device.tokens.copy(slots, memory.tokens, target)
            else:
                memory.tokens.write(target, copied.rows())
            if source_state is not None and state is not None:
                if copied is None:
                    _states(device).copy(_one(source_state), _states(memory), _one(state))
                else:
                    _states(memory).write(_one(state), copied.state)
            return 1

        entry = (place, start)
        line.writes.append(entry)

        def collected(done: int) -> None:
            line.writes.remove(entry)
            if pinned:
                self._tree.unpin(node)
            host.pool.unpin(at)
            if not done:
                host.release(target, state)
                counters.lost += tokens
                return
            added = host.add(place, start, target, state, node)
            if added is None:
                counters.skipped += tokens  # the prefix before it was evicted meanwhile
                return
            counters.written += tokens
            counters.bytes_in += size
            counters.demoted += 0 if pinned else tokens
            self.copy_to_disk(added)

        line.submit(work, collected, size)
        return True

    # -- down: host to disk ------------------------------------------------------------------

    def copy_to_disk(self, node: Node) -> None:
        """Copy the prefix of a host node to the disk, as far as the policy of writing wants it."""
        disk, line = self.disk, self._disk_line
        if disk is None or line is None or not self._copies or node.parent is None:
            return
        _, at, start = self._reach(node, disk, line)
        last = self._wanted(node, start, at, line, disk)
        if last is not None:
            self._to_disk(last, place_of(last), min(start, last.end), pinned=True)

    def demote_to_disk(self, node: Node) -> None:
        """A node of the host, or its state, is about to be evicted: copy it to the disk if it is worth it."""
        disk, line = self.disk, self._disk_line
        if not self._demotes or node.parent is None:
            return
        self._lost(self._move(node, node.depth, self._host_line, self.host), self.host)
        if disk is None or line is None:
            return
        if disk.has_states and node.state is None:
            return  # nothing could resume from it
        place, at, start = self._reach(node, disk, line)
        if start >= node.end and (node.state is None or at.state is not None or at.end != node.end):
            return
        move = self._move(node, min(max(node.depth, start), node.end), line, disk, self._host_line)
        if not self._writing.demotes(move):
            self.counters["disk"].refused += move.tokens
            self._lost(move, disk)
            return
        self._to_disk(node, place, min(start, node.end), pinned=False)

    def forget_on_disk(self, node: Node) -> None:
        """A node of the disk is about to be evicted."""
        disk, line = self.disk, self._disk_line
        if disk is not None and line is not None:
            self._lost(self._move(node, node.depth, line, disk, self._host_line), disk)

    def _to_disk(self, node: Node, place: Place, start: int, *, pinned: bool) -> None:
        host, disk, line = self.host, self.disk, self._disk_line
        if disk is None or line is None:
            return
        counters = self.counters["disk"]
        page = self._page_size
        tokens = node.end - start
        slots = _slots(node)[start : node.end]
        source_state = None if node.state is None else node.state.slot
        size = tokens * self._layout.token_bytes + (
            self._layout.state_bytes if source_state is not None else 0
        )
        if line.copies.in_flight + size > self._in_flight:
            counters.skipped += tokens
            return
        at = disk.find(self._first(place, start))
        disk.pool.pin(at)
        fits, states = disk.reserve(at, tokens, int(source_state is not None))
        if fits < tokens or states < int(source_state is not None):
            disk.release(fits, states)
            disk.pool.unpin(at)
            counters.skipped += tokens
            return
        before = at.hashes[-1] if at.hashes and at.end == start else None
        hashes = disk.hashes(place, start, node.end, before)
        ending = hashes[-1] if hashes else at.hashes[-1] if at.hashes else 0
        memory, store = host.buffers, disk.store
        copied = None
        if pinned:
            host.pool.pin(node)
        else:
            copied = _Snapshot(memory, slots, source_state)

        def work() -> int:
            rows = None if copied is None else copied.rows()
            for number, value in enumerate(hashes):
                here = slice(number * page, (number + 1) * page)
                parts = memory.tokens.pack(slots[here]) if rows is None else packed([r[here] for r in rows])
                if not store.put(disk.page_key(value), parts):
                    return number
            if source_state is not None:
                parts = _states(memory).pack(_one(source_state)) if copied is None else packed(copied.state)
                if store.put(disk.state_key(ending), parts):
                    return len(hashes) + 1
            return len(hashes)

        entry = (place, start)
        line.writes.append(entry)

        def collected(pages: int) -> None:
            line.writes.remove(entry)
            if pinned:
                host.pool.unpin(node)
            disk.pool.unpin(at)
            disk.release(fits, states)
            kept = min(pages, len(hashes))
            has_state = pages > len(hashes)
            lost = [disk.page_key(value) for value in hashes[kept:]]
            if source_state is not None and not has_state:
                lost.append(disk.state_key(ending))
            if lost:
                disk.delete(lost)  # this rank may have kept what another could not
                counters.lost += tokens - kept * page
            reached = start + kept * page
            if not kept and not has_state:
                return
            added = disk.add(self._first(place, reached), start, hashes[:kept], has_state, node)
            if added is None:
                state_keys = [disk.state_key(ending)] if has_state else []
                disk.delete([*(disk.page_key(value) for value in hashes[:kept]), *state_keys])
                counters.skipped += kept * page  # as above
                return
            counters.written += kept * page
            counters.bytes_in += kept * page * self._layout.token_bytes
            counters.demoted += 0 if pinned else kept * page

        line.submit(work, collected, size)

    # -- up ----------------------------------------------------------------------------------

    def load(self, load: Load) -> bool:
        """Begin to load a prefix; returns whether anything is loaded."""
        host = self.host
        at = host.usable(host.find(load.place))
        disk_node = None
        if self.disk is not None:
            found = self.disk.usable(self.disk.find(load.place))
            if found.end > max(at.end, load.start):
                disk_node = found
        if disk_node is not None and self._fetch(load, disk_node):
            return True
        return self._up(load)

    def prefetch(self, place: Place) -> Load | None:
        """Begin to copy what only the disk has of a prefix to the host; None if there is nothing to copy."""
        if self.disk is None:
            return None
        load = Load(place, 0, 0, None)
        node = self.disk.usable(self.disk.find(place))
        if node.end > self.host.usable(self.host.find(place)).end and self._fetch(load, node, on=False):
            return load
        return None

    def _fetch(self, load: Load, node: Node, *, on: bool = True) -> bool:
        """Copy a prefix from the disk to the host, and on to the device."""
        host, disk, line = self.host, self.disk, self._disk_line
        if disk is None or line is None:
            return False
        page, counters = self._page_size, self.counters["disk"]
        place = place_of(node)
        at = host.find(place)
        start, tokens = at.end, node.end - at.end
        wants_state = node.state is not None and not (at.end == node.end and at.state is not None)
        if tokens <= 0 and not wants_state:
            return False
        move = self._move(node, start, line, host, self._host_line)._replace(
            recompute=self._cost.recompute_seconds(max(load.start, 0), node.end)
        )
        if not self._writing.loads(move):
            return False
        disk.pool.pin(node)
        host.pool.pin(at)
        target, state = host.reserve(at, tokens, int(wants_state))
        if wants_state and (state is None or target.size < tokens):
            host.release(target, state)
            target, state = _NO_SLOTS, None
        if not target.size and state is None:
            disk.pool.unpin(node)
            host.pool.unpin(at)
            counters.skipped += tokens
            return False
        hashes = disk.hashes(place, start, start + target.size)
        ending = node.hashes[-1] if node.hashes else 0
        memory, store = host.buffers, disk.store

        def work() -> int:
            for number, value in enumerate(hashes):
                if load.cancelled and self._ranks.size == 1:
                    return number
                payload = store.get(disk.page_key(value))
                here = target[number * page : (number + 1) * page]
                if payload is None or not memory.tokens.unpack(here, payload):
                    return number
            if state is not None:
                payload = store.get(disk.state_key(ending))
                if payload is not None and _states(memory).unpack(_one(state), payload):
                    return len(hashes) + 1
            return len(hashes)

        def collected(pages: int) -> None:
            disk.pool.unpin(node)
            host.pool.unpin(at)
            kept = min(pages, len(hashes)) * page
            whole = pages >= len(hashes) + (state is not None)
            reached = start + kept
            has_state = state is not None and pages > len(hashes)
            host.release(target[kept:], None if has_state else state)
            if kept or has_state:
                host.add(
                    self._first(place, reached), start, target[:kept], state if has_state else None, node
                )
                counters.loaded += kept
                counters.bytes_out += kept * self._layout.token_bytes
            if not whole and not load.cancelled:
                counters.lost += tokens - kept
                disk.drop(place, reached)
            if not on or load.cancelled:
                self._end(load)
            else:
                self._up(load)

        size = target.size * self._layout.token_bytes + (self._layout.state_bytes if state is not None else 0)
        line.submit(work, collected, size)
        load._line, load._until = line, line.copies.submitted
        return True

    def _up(self, load: Load) -> bool:
        """Copy a prefix from the host to the device."""
        host = self.host
        line, counters = self._host_line, self.counters["host"]
        device = self.device
        node = host.usable(host.find(load.place))
        below = self._on_device(load.place)
        have = self._tree.usable(below) if host.has_states else below
        if node.end <= have.end:
            return self._end(load)
        place = place_of(node)
        start = min(below.end, node.end)
        below = self._on_device(self._first(place, start))
        tokens = node.end - start
        move = self._move(node, start, line, host)._replace(
            recompute=self._cost.recompute_seconds(have.end, node.end)
        )
        if not self._writing.loads(move):
            return self._end(load)
        host.pool.pin(node)
        self._tree.pin(below)
        target, state = self._reserve_on_device(tokens, node.state is not None)
        if target is None:
            host.pool.unpin(node)
            self._tree.unpin(below)
            counters.skipped += tokens
            return self._end(load)
        source = _slots(node)[start : node.end]
        source_state = None if node.state is None else node.state.slot
        memory, buffers = host.buffers, self._buffers

        def work() -> int:
            memory.tokens.copy(source, buffers.tokens, target)
            if state is not None and source_state is not None:
                _states(memory).copy(_one(source_state), _states(buffers), _one(state))
            return 1

        def collected(done: int) -> None:
            host.pool.unpin(node)
            if not done or load.cancelled:
                self._tree.unpin(below)
                device.release(target)
                if state is not None:
                    device.release_state(state)
                counters.lost += 0 if done else tokens
                self._end(load)
                return
            load.node = self._insert(place, below, target, state, load.request)
            self._tree.unpin(below)
            load.loaded = tokens
            counters.loaded += tokens
            counters.bytes_out += tokens * self._layout.token_bytes
            self._end(load)

        size = tokens * self._layout.token_bytes + (self._layout.state_bytes if state is not None else 0)
        line.submit(work, collected, size)
        load._line, load._until = line, line.copies.submitted
        return True

    def _reserve_on_device(self, tokens: int, wants_state: bool) -> tuple[Any, int | None]:
        """Reserve slots for a load; None for the first if there is no room, and then nothing is reserved."""
        device, state = self.device, None
        if wants_state:
            state = device.allocate_state()
            if state is None:
                return None, None
        slots = device.allocate(tokens)
        if slots is None and state is not None:
            device.release_state(state)
        return (None, None) if slots is None else (np.asarray(_as_array(slots)), state)

    def _insert(
        self, place: Place, below: Node, slots: NDArray[np.int64], state: int | None, request: Hashable
    ) -> Node:
        """Give loaded slots to the device's cache; returns the node at their end, locked."""
        device = self.device
        tokens = np.frombuffer(place.key, np.int64)
        extra, salt = (*place.namespace, None, None)[:2]
        whole = np.concatenate((_slots(below), slots))
        more = {} if state is None else {"state": state}
        if request not in device._requests:
            request = None  # it has ended meanwhile
        done = device.insert(tokens, whole, request, extra_key=extra, cache_salt=salt, **more)
        node: Node = done.node
        device.lock(node)
        spare = np.asarray(_as_array(done.duplicates))
        if spare.size:
            device.release(spare)
        if state is not None and (node.state is None or node.state.slot != state):
            device.release_state(state)  # another request left one there meanwhile
        return node

    def _end(self, load: Load) -> bool:
        load.done = True
        load._line = None
        return False

    def _on_device(self, place: Place) -> Node:
        """The node at the end of what the device has of a prefix; nothing is used."""
        tree = self._tree
        node: Node = tree.match(tree.root(place.namespace), memoryview(place.key), self._nobody, [])
        return node

    def _first(self, place: Place, tokens: int) -> Place:
        """The first tokens of a prefix, whole pages."""
        return Place(place.namespace, place.key[: tokens // self._page_size * self._tree.page_bytes])

    # -- time --------------------------------------------------------------------------------

    def step(self) -> int:
        """Collect the copies that every rank has finished; returns how many."""
        lines, ranks = self.lines, self._ranks
        counts = ranks.least([line.copies.ready() for line in lines])
        batch = [
            (line, job) for line, count in zip(lines, counts, strict=True) for job in line.copies.take(count)
        ]
        if not batch:
            return 0
        facts = [fact for _, job in batch for fact in (job.result, -math.ceil(job.seconds * 1e9))]
        agreed = ranks.least(facts)
        for number, (line, job) in enumerate(batch):
            done, nanoseconds = agreed[2 * number], -agreed[2 * number + 1]
            # The slowest rank's time: a prefix is there once all ranks have it.
            line.link.ended(job.size, nanoseconds / 1e9, 0.0)
            job.collected(done)
        return len(batch)

    def wait(self, load: Load) -> None:
        """Wait until a load is done, collecting what ends before it."""
        while not load.done and load._line is not None:
            load._line.copies.wait(load._until)
            self.step()

    def drain(self) -> None:
        """Wait until no copy is under way."""
        while any(line.copies.submitted > line.copies.taken for line in self.lines):
            for line in self.lines:
                line.copies.wait(line.copies.submitted)
            self.step()


def _one(slot: int) -> NDArray[np.int64]:
    return np.array([slot], np.int64)


def _states(buffers: Buffers) -> Rows:
    if buffers.states is None:
        raise ValueError("the buffers have no rows for states")
    return buffers.states


def _slots(node: Node) -> NDArray[np.int64]:
    """Slots of a prefix, from its first token on."""
    parts = [part.slots for part in node.path() if part.slots is not None]
    return np.concatenate(parts) if parts else _NO_SLOTS


def _as_array(slots: Any) -> Any:
    return slots.detach().cpu().numpy() if hasattr(slots, "detach") else slots
