"""Moves prefixes between the tiers.

A copy is prepared on the caller's thread: slots are reserved, sources are pinned or, if they are about to be
evicted, read. The thread of a link moves the bytes. :meth:`Mover.step` collects what all ranks have
finished, in the order of submission, and only then does a tree change. So trees depend on the stream of
calls alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from costcache.tiers.ahead import Ahead
from costcache.tiers.counters import TierCounters
from costcache.tiers.down import Down
from costcache.tiers.facts import Facts
from costcache.tiers.up import Load, Up

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.radix.node import Node
    from costcache.tiers.device import DeviceTier
    from costcache.tiers.disk import DiskTier
    from costcache.tiers.host import HostTier
    from costcache.tiers.layout import Layout
    from costcache.tiers.line import Line
    from costcache.tiers.ranks import Ranks
    from costcache.tiers.writing import Writing

__all__ = ["Mover"]


class Mover:
    """The copies between the device, the host and the disk.

    Attributes:
        device: The device.
        host: The host tier.
        disk: The disk tier; None without any.
        lines: The links: device to host, and host to disk.
        counters: Counts by tier.
    """

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier,
        disk: DiskTier | None,
        lines: list[Line],
        layout: Layout,
        cost: CostModel,
        writing: Writing,
        in_flight: int,
        ranks: Ranks,
    ) -> None:
        """Connect the tiers: what leaves one is offered to the next."""
        self.device = device
        self.host = host
        self.disk = disk
        self.lines = lines
        self.counters = counters = {"host": TierCounters(), "disk": TierCounters()}
        self._ranks = ranks
        self._facts = facts = Facts(cost, layout, device.pool)
        self._to_disk: Down | None = None
        if disk is not None:
            back = [lines[1], lines[0]]
            self._to_disk = Down(host, disk, back, counters["disk"], facts, writing, in_flight)
            disk.leaving = self._leaves_disk
        self._to_host = Down(
            device, host, lines[:1], counters["host"], facts, writing, in_flight, self.copy_to_disk
        )
        host.leaving = self._leaves_host
        self._ahead: Ahead | None = None
        if writing.ahead and device.pool.unit == "tokens":
            self._ahead = Ahead(device, self._to_host)
        self._up = Up(device, host, disk, lines, counters, facts, writing, ranks)
        self.demote = self._to_host.demote
        self.copy_down = self._to_host.copy
        self.load = self._up.load
        self.prefetch = self._up.prefetch

    def copy_to_disk(self, node: Node) -> None:
        """Copy the prefix of a host node to the disk, as far as the policy of writing wants it."""
        if self._to_disk is not None:
            self._to_disk.copy(node)

    def _leaves_host(self, node: Node) -> None:
        if self._to_host.demotes:
            host = self.host
            self._facts.lost(host, self._facts.of(host, node, node.depth, host, self.lines[:1]))
        if self._to_disk is not None:
            self._to_disk.demote(node)

    def _leaves_disk(self, node: Node) -> None:
        disk = self.disk
        if disk is not None and self._to_host.demotes:
            self._facts.lost(disk, self._facts.of(disk, node, node.depth, disk, self.lines[::-1]))

    # -- time --------------------------------------------------------------------------------

    def make_ahead(self) -> int:
        """Make room on the device ahead of need, if the policy of writing does that; returns the tokens."""
        return 0 if self._ahead is None else self._ahead.make()

    def follow(self) -> None:
        """Let each tier rank by the order that is in force on the device by now."""
        self.host.follow()
        if self.disk is not None:
            self.disk.follow()

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
        while not load.done and load._wait():
            self.step()

    def drain(self) -> None:
        """Wait until no copy is under way."""
        while any(line.copies.submitted > line.copies.taken for line in self.lines):
            for line in self.lines:
                line.copies.wait(line.copies.submitted)
            self.step()
