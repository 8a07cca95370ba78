"""Copies up: what a request asks for is loaded from the disk to the host, and from the host to the device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from costcache.tiers.tier import Place, Source, place_of

if TYPE_CHECKING:
    from costcache.radix.node import Node
    from costcache.tiers.counters import TierCounters
    from costcache.tiers.device import DeviceTier
    from costcache.tiers.disk import DiskTier
    from costcache.tiers.facts import Facts
    from costcache.tiers.host import HostTier
    from costcache.tiers.line import Line
    from costcache.tiers.ranks import Ranks
    from costcache.tiers.writing import Writing

__all__ = ["Load", "Up"]


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

    def _follow(self, line: Line) -> None:
        """Its next copy is the last one submitted to a line."""
        self._line, self._until = line, line.copies.submitted

    def _finish(self) -> None:
        """Nothing more happens."""
        self.done = True
        self._line = None

    def _wait(self) -> bool:
        """Wait until its copy has finished on this rank; False if none is under way."""
        if self._line is None:
            return False
        self._line.copies.wait(self._until)
        return True

    def __repr__(self) -> str:
        how = "cancelled" if self.cancelled else "done" if self.done else "under way"
        return f"Load([{self.start}, {self.end}), {how}, {self.loaded} loaded)"


class Up:
    """The loads of a tiered cache."""

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier,
        disk: DiskTier | None,
        lines: list[Line],
        counters: dict[str, TierCounters],
        facts: Facts,
        writing: Writing,
        ranks: Ranks,
    ) -> None:
        """Connect the tiers; ``lines`` are device to host, and host to disk if there is one."""
        self._device = device
        self._host = host
        self._disk = disk
        self._lines = lines
        self._counters = counters
        self._facts = facts
        self._writing = writing
        self._ranks = ranks

    def load(self, load: Load) -> bool:
        """Begin to load a prefix; returns whether anything is loaded."""
        host, disk = self._host, self._disk
        at = host.usable(host.find(load.place))
        if disk is not None:
            found = disk.usable(disk.find(load.place))
            if found.end > max(at.end, load.start) and self._fetch(load, disk, found):
                return True
        return self._up(load)

    def prefetch(self, place: Place) -> Load | None:
        """Begin to copy what only the disk has of a prefix to the host; None if there is nothing to copy."""
        host, disk = self._host, self._disk
        if disk is None:
            return None
        load = Load(place, 0, 0, None)
        node = disk.usable(disk.find(place))
        if node.end > host.usable(host.find(place)).end and self._fetch(load, disk, node, on=False):
            return load
        return None

    def _fetch(self, load: Load, disk: DiskTier, node: Node, *, on: bool = True) -> bool:
        """Copy a prefix from the disk to the host, and on to the device."""
        host, line = self._host, self._lines[1]
        page, counters = host.page_size, self._counters["disk"]
        place = place_of(node)
        at = host.find(place)
        start, tokens = at.end, node.end - at.end
        rows = 0
        if disk.needs_ending and not (at.end == node.end and host.ends(at)):
            rows = disk.ending_rows(node.end)
        if tokens <= 0 and not rows:
            return False
        move = self._facts.of(disk, node, start, host, [line, self._lines[0]])._replace(
            recompute=self._facts.cost.recompute_seconds(max(load.start, 0), node.end)
        )
        if not self._writing.loads(move):
            return False
        keys = disk.ending_keys(place, node.end) if rows else []
        disk.tree.pin(node)
        landing = host.land_part(place, start, rows)
        if not landing.pages and not landing.ending.size:
            landing.give_back()
            disk.tree.unpin(node)
            counters.skipped += tokens
            return False
        hashes = disk.hashes(place, start, start + landing.pages * page)
        memory, ending = host.buffers, landing.ending
        alone = self._ranks.size == 1

        def work() -> int:
            return disk.read(
                hashes, keys, memory, landing.slots, ending, unwanted=lambda: alone and load.cancelled
            )

        def collected(done: int) -> None:
            disk.tree.unpin(node)
            whole = done >= len(hashes) + bool(ending.size)
            added, kept = landing.settle(done, node)
            if added is not None:
                counters.loaded += kept
                counters.bytes_out += kept * memory.tokens.row_bytes
            if not whole and not load.cancelled:
                counters.lost += tokens - kept
                disk.drop(place, start + kept)
            if not on or load.cancelled:
                self._end(load)
            else:
                self._up(load)

        line.submit(work, collected, landing.size)
        load._follow(line)
        return True

    def _up(self, load: Load) -> bool:
        """Copy a prefix from the host to the device."""
        device, host, line = self._device, self._host, self._lines[0]
        counters = self._counters["host"]
        node = host.usable(host.find(load.place))
        below = device.find(load.place)
        have = device.usable(below).end
        if node.end <= have:
            return self._end(load)
        place = place_of(node)
        start = min(below.end, node.end)
        tokens = node.end - start
        move = self._facts.of(host, node, start, host, [line])._replace(
            recompute=self._facts.cost.recompute_seconds(have, node.end)
        )
        if not self._writing.loads(move):
            return self._end(load)
        host.tree.pin(node)
        ending = host.ending(node)
        landing = device.land(place, start, ending.size)
        if landing is None:
            host.tree.unpin(node)
            counters.skipped += tokens
            return self._end(load)
        what = Source(host.buffers, host.slots_of(node)[start : node.end], ending, at_once=False)

        def collected(done: int) -> None:
            host.tree.unpin(node)
            if not done or load.cancelled:
                landing.give_back()
                counters.lost += 0 if done else tokens
            else:
                load.node = landing.settle(load.request)
                load.loaded = tokens
                counters.loaded += tokens
                counters.bytes_out += tokens * host.buffers.tokens.row_bytes
            self._end(load)

        line.submit(lambda: landing.write(what), collected, landing.size)
        load._follow(line)
        return True

    def _end(self, load: Load) -> bool:
        load._finish()
        return False
