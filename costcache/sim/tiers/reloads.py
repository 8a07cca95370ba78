"""What a request finds on the device and on the tiers below it, and what of that is loaded.

A request of a model with states resumes from a state of the device, or from one that is loaded, alone if the
device has the KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.sim.tiers.lower import LowerTiers
    from costcache.sim.tiers.moves import Moves
    from costcache.tiers import Writing

__all__ = ["Reloads"]


class Reloads:
    """Finds what is loaded for a request, and loads it."""

    def __init__(self, lower: LowerTiers, moves: Moves, writing: Writing) -> None:
        """Load from these tiers, by the facts of moves, what the policy of writing wants."""
        self._lower, self._moves, self._writing = lower, moves, writing
        self._device = lower.device

    def find(self, path: list[int], here: int) -> tuple[int, list[tuple[int, int]]]:
        """Find what a request need not compute.

        The request loads extents from where it can use the device's on, as far as there is no gap. The last
        ones are left out as long as no request can resume from their end, or the policy would rather compute
        them.

        Args:
            path: Its extents.
            here: How many of them the device has.

        Returns:
            How many extents need not be computed; and those to load, as positions in the path, and the level
            of each: -1 for what the device has, but cannot use without the state that is loaded.
        """
        device, lower = self._device, self._lower
        usable = self._usable(path, here)
        found: list[tuple[int, int]] = []
        for at in range(usable, len(path)):
            level = -1 if at < here else lower.level(path[at])
            if level is None:
                break
            found.append((at, level))
        start = device.of.prefix(path, usable)
        while found:
            at, level = found[-1]
            resumes = lower.state_level(path[at]) is not None if device.has_states else level >= 0
            if resumes:
                stop = device.of.prefix(path, at + 1)
                if self._writing.loads(self._moves.up(start, stop, self._sizes(path, found))):
                    return at + 1, found
            found.pop()
        return usable, found

    def load(self, path: list[int], loads: list[tuple[int, int]], start: float) -> float:
        """Load extents as :meth:`find` returns them; returns the seconds that it takes from ``start`` on."""
        if not loads:
            return 0.0
        until = self._lower.links.load(self._sizes(path, loads), start)
        for at, level in loads:
            if level >= 0:
                self._lower.moved[level].hits += self._device.of.tokens[path[at]]
        return until - start

    def _usable(self, path: list[int], here: int) -> int:
        """Extents on the device that a request can use: up to the last state, if the model has states."""
        if self._device.has_states:
            while here and not self._device.records[path[here - 1]].has_state:
                here -= 1
        return here

    def _sizes(self, path: list[int], loads: list[tuple[int, int]]) -> list[int]:
        """Bytes to load from each tier: KV of the extents, and the last state alone."""
        device, lower = self._device, self._lower
        sizes = [0] * len(lower.tiers)
        for at, level in loads:
            if level >= 0:
                sizes[level] += device.of.tokens[path[at]] * device.token_bytes
        state = lower.state_level(path[loads[-1][0]]) if device.has_states else None
        if state is not None:
            sizes[state] += device.state_bytes
        return sizes
