"""Demotion: what of that which leaves a tier, or is copied while it stays, is written to the next one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from costcache.sim.tiers.tier import ExtentRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.records import RequestRecord
    from costcache.sim.tiers.lower import LowerTiers
    from costcache.sim.tiers.moves import Moves
    from costcache.sim.tiers.times import Times
    from costcache.tiers import Writing

__all__ = ["Demotion"]

_KEEPS: Final = 0.98
"""Share of its weight that an average over evictions keeps at each one."""


class Demotion:
    """Writes down what the policy of writing wants, and drops the rest."""

    def __init__(self, lower: LowerTiers, moves: Moves, writing: Writing, times: Times) -> None:
        """Take in what the tiers below evict.

        Args:
            lower: The tiers below the device.
            moves: The facts of moves.
            writing: What is written.
            times: The server's times.
        """
        self._lower, self._moves, self._writing, self._times = lower, moves, writing, times
        for level, tier in enumerate(lower.tiers):
            tier.evicts, tier.evicts_state = self._evicts(level)

    def leave(self, record: ExtentRecord, level: int = 0) -> float:
        """An extent leaves the tier above ``level``; returns when what is written of it is there."""
        lower = self._lower
        if level == len(lower.tiers):
            return self._times.now
        tier = lower.tiers[level]
        copy = tier.records[record.extent]
        tier.pool.inherit(copy, record)
        written = self._times.now
        if copy.held:
            if record.has_state:
                written = self.leave_state(record, level)
        else:
            move = self._moves.down(copy, level, record.has_state, waits=level == 0)
            if self._writing.demotes(move):
                written = lower.write(copy, level, record.has_state)
            else:
                tier.price.lost(move, tier.capacity)
                if lower.doubles is not None and level == 0:
                    lower.doubles.saved += move.size
        tier.track_state(copy, copy.has_state)
        if copy.pins:
            tier.pool.unpin(copy)  # only now: what is pinned makes no room for itself
        if copy.held:
            return written
        tier.drop(copy)
        return self.leave(record, level + 1)

    def leave_state(self, record: ExtentRecord, level: int = 0) -> float:
        """A state leaves the tier above ``level``, but its KV need not; returns when it is written."""
        lower = self._lower
        if level == len(lower.tiers):
            return self._times.now
        copy = lower.tiers[level].records[record.extent]
        if copy.has_state:
            return self._times.now
        move = self._moves.down(copy, level, True, waits=level == 0, alone=copy.held)
        if not self._writing.demotes(move):
            return self._times.now
        return lower.write_state(copy, level) if copy.held else lower.write(copy, level, True)

    def leave_beyond(self, path: list[int], kept: int, requests: list[RequestRecord]) -> None:
        """What a prompt has beyond the device's pool is copied below from where the request ran, or dropped.

        As for any eviction, but that nobody waits for it.

        Args:
            path: The prompt's extents.
            kept: How many of them the device has.
            requests: The request's record, of each tier below.
        """
        device = self._lower.device
        before = device.records[path[kept - 1]] if kept else None
        beyond = []
        for at in range(kept, len(path)):
            leaves = ExtentRecord(path[at], None, device.of)
            leaves.has_state = device.has_states and at == len(path) - 1
            self._lower.track(path[at], requests, state=leaves.has_state, after=before)
            beyond.append(leaves)
        self.copy(beyond)
        for leaves in reversed(beyond):  # as the device evicts: leaves first
            self.leave(leaves)

    def copy(self, records: list[ExtentRecord]) -> None:
        """Copy what the policy wants of a prompt that the device has now, unless evictions do that."""
        lower, ahead = self._lower, self._writing.ahead
        for level, tier in enumerate(lower.tiers):
            for record in records:
                copy = tier.records[record.extent]
                if copy.held:
                    if record.has_state and not copy.has_state:
                        lower.write_state(copy, level)
                elif ahead or (level and not lower.tiers[level - 1].held(record.extent)):
                    continue
                elif self._writing.copies(self._moves.down(copy, level, record.has_state, waits=False)):
                    lower.write(copy, level, record.has_state)

    def _evicts(self, level: int) -> tuple[Callable[[ExtentRecord], None], Callable[[ExtentRecord], None]]:
        """What happens when the tier at ``level`` evicts an extent, and when it evicts a state alone."""
        tier, moved = self._lower.tiers[level], self._lower.moved[level]

        def evicted(record: ExtentRecord) -> None:
            moved.evicted += tier.size(record.extent, record.has_state)
            tier.price.lost(self._moves.down(record, level, record.has_state, waits=False), tier.capacity)
            stayed = max(0.0, self._times.now - record.since)
            tier.stays = stayed if tier.stays == math.inf else tier.stays * _KEEPS + stayed * (1 - _KEEPS)
            self.leave(record, level + 1)

        def evicted_state(record: ExtentRecord) -> None:
            moved.evicted += tier.state_bytes
            tier.price.lost(self._moves.down(record, level, True, waits=False, alone=True), tier.capacity)
            self.leave_state(record, level + 1)

        return evicted, evicted_state
